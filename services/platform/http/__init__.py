"""The HTTP kit: the JSON door beside gRPC."""
