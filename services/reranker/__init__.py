"""The reranker process: scores a pool in full, then applies rules and diversity."""
