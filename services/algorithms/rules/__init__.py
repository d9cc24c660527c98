"""What an answer may hold and in which order: filters, boosts, pins, caps, diversity, reserved positions."""
