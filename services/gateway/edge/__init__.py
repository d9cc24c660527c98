"""API keys, roles, the audit log, signed texts."""
