"""A catalogue as trained and as changed, and item popularity."""
