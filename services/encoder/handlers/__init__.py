"""Handlers of the encoder process: apply the stream, encode a history on request."""
