"""PEFA (arXiv:2312.02429): feedback changes retrieval without training, by exact sums and a bounded memory."""
