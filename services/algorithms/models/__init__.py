"""Encoders of texts in PyTorch, from a folder of published weights. Nothing here trains."""
