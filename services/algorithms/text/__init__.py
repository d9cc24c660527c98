"""Words: BM25, word pieces, and one ranking of several."""
