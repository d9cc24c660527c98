"""From a user's events to a query state: the window, the steps of one event, what an event and an absence say."""
