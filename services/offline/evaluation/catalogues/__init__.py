"""Data of retrieval benchmarks: sizes, generated catalogues fitted to trained models, and trained bundles."""
