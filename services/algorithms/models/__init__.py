"""Text encoders in PyTorch, from published weights. Nothing here trains."""
