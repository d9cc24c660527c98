"""Answers for readers: recommendations, similar items, explanations, and their parts."""
