"""Proven exact top-K without scoring everything: four bounds, item clusters, and the cheapest of them as measured."""
