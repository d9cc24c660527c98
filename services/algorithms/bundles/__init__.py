"""Folders of a model and of a search by words: what files they hold, how they are read and put into place."""
