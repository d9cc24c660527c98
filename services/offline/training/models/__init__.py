"""What training fits: encoders over histories, heads, and the models over texts."""
