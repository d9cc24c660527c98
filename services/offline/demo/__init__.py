"""`freshet demo`: the whole system on real people's interactions, measured while it runs.

Read `schedule` (who sends what, when), `replay` (the outside client that sends and asks on a clock), `baselines`,
`sittings` (hit rates by time since the previous event), `summary`, then `demo`.
"""
