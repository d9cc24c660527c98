"""Micro-benchmarks of the retrieval library: every speed beside its quality and its physical floor."""
