"""Directories of a model and of a text search: their files, and how they are read and written."""
