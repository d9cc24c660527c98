"""Top-K over query and item states: one small protocol, then one file per algorithm."""
