"""The encoder process: query states from the stream, and on request."""
