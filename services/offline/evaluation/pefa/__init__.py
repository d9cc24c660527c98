"""PEFA on text, and what it costs at query time."""
