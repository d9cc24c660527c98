"""One way to evaluate a ranking: a scorer and a split give ranked events, those give metrics, strata and intervals."""
