"""Generating identifiers from phrases as the vocabulary grows."""
