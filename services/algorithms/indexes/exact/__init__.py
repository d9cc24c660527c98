"""Proven exact top-K without scoring everything: certified bounds, or brute force where that is cheaper."""
