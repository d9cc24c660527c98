"""The files of a model and of a text search."""
