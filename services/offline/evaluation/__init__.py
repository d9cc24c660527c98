"""Evaluation and benchmarks: every speed is reported with its quality and its roofline."""
