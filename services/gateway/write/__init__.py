"""What clients write: interactions, impressions, items, and the wish to be forgotten."""
