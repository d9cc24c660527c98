"""The encoder process: the stream of interactions in, query states out; and query states on demand."""
