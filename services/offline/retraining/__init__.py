"""Train a new model from the log and compare it with the serving model before it serves."""
