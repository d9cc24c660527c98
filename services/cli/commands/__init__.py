"""One module per `freshet` command; each imports what it needs only when it runs, so that `--help` is immediate."""
