"""Answers for readers: recommendations, similar items, explanations, and what they are made of."""
