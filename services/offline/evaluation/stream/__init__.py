"""The value of feedback without training, event by event."""
