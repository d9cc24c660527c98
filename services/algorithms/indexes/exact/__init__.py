"""Proven exact top-K: certified bounds, or brute force where that is cheaper."""
