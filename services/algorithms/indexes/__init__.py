"""Top-K over query and item states: one small protocol, and one file per algorithm."""
