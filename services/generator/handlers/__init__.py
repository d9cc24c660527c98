"""Handlers of the generator."""
