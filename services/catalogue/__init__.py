"""The catalogue as processes follow it: changes, snapshots, readiness."""
