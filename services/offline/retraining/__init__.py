"""The loop closed: a new model from the log, judged beside the one that serves, before anybody is answered by it."""
