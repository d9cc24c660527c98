"""The engine: a scorer and a split give ranked events, and these give metrics, strata and intervals."""
