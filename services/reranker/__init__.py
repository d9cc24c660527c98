"""The reranker process: the full Mixture of Logits over a pool, then rules and diversity."""
