"""PEFA on text, and its cost at query time."""
