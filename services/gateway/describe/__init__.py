"""The catalogue and a user's stored data, for people."""
