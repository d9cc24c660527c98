"""The reranker process: scores a pool with the full Mixture of Logits, then applies rules and diversity."""
