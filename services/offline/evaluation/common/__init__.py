"""Shared by several benchmarks: pages, plots, timing, recall, the roofline, real vectors."""
