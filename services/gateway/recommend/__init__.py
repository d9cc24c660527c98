"""Reads of clients: recommendations, similar items, explanations, and their parts."""
