"""Training's models: encoders over histories, heads, and models over texts."""
