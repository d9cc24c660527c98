"""The HTTP kit: JSON over HTTP, as an alternative to gRPC."""
