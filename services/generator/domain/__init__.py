"""The items, and the sources that find them by words."""
