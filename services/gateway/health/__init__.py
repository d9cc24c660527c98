"""Readiness and calls by the minute, for people on call."""
