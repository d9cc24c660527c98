"""Handlers of the refresher."""
