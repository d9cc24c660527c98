"""What retrieval is measured on: sizes, generated catalogues fitted to trained models, and trained bundles."""
