"""One module per `freshet` command; each delays its imports until it runs, so that `--help` is immediate."""
