"""The real and the in-memory forms of the generator's ports."""
