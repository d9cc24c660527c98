"""From a user's events to a query state."""
