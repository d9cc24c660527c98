"""Which version set answers which user, and the shadow."""
