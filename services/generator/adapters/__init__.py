"""Adapters of the generator's ports."""
