"""Search by words: every source at once, one fused list."""
