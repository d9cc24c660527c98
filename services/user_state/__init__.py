"""What Redis holds of a user: keys and scripts, the store, sessions, who holds which partition."""
