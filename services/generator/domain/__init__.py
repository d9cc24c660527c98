"""What the generator answers with: the items, and the three sources that find them by words."""
