"""Proven exact top-K without scoring everything: four bounds, item clusters, and the measured cheapest of them."""
