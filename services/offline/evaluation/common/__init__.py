"""What several benchmarks share: pages, plots, timing, recall, the roofline, real vectors."""
