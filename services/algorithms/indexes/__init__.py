"""Top-K over query and item states: one protocol, one file per algorithm."""
