"""Content and order of an answer: filters, boosts, pins, caps, diversity, reserved positions."""
