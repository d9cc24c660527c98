"""How the parts do, for people on call: readiness, and calls by the minute. No recommendation waits for it."""
