"""Handlers of the encoder process."""
