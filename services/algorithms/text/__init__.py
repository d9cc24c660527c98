"""Words: BM25, word pieces, and rank fusion."""
