"""One module per kind of part: installation, start, readiness, version."""
