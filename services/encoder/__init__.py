"""The encoder process: computes query states from the stream of interactions, and on request."""
