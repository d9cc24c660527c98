"""A catalogue as trained and as changed by the stream, and item popularity."""
