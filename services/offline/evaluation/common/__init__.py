"""What several benchmarks share: tables, floors under a time, real vectors."""
