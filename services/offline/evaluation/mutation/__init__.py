"""Search latency and recall while items change."""
