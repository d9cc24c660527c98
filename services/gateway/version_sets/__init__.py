"""Which version set answers whom, and the one asked beside it."""
