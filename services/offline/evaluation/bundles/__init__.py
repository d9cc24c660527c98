"""Evaluate a bundle on one's own data: `freshet evaluate`, `freshet compare` and `freshet inspect`."""
