"""The items, and the three sources that find them by words."""
