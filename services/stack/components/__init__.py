"""One recipe per kind of part: installation, start, readiness, version."""
