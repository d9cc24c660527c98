"""Gateway, candidates and reranker in one process: the only package that imports packages of processes."""
