"""Data of retrieval benchmarks: sizes, and generated catalogues fitted to trained models."""
