"""What an event costs a user's state."""
