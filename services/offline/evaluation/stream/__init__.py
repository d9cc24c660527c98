"""What feedback without training is worth, event by event."""
