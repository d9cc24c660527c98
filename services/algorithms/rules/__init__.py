"""Content and order of an answer."""
