"""From a user's events to a query state: the window, incremental encoding, the effects of actions and absence."""
