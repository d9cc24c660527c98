"""What a training step costs: the mixture's loss by itself, and whole steps of each head."""
