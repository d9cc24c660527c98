"""Freshet: one Python package, one folder per deployed process. See docs/concepts.md."""
