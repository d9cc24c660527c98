"""PEFA (arXiv:2312.02429): feedback changes retrieval without training."""
