"""What the encoder process does: apply the stream, encode a history on demand."""
