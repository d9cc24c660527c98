"""The command line, `freshet`."""
