"""PEFA (arXiv:2312.02429): feedback reshapes retrieval without a gradient, from exact sums and a bounded memory."""
