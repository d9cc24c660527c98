"""Writes of clients: interactions, impressions, items, and forgets."""
