"""`freshet demo`: the whole system on real people's interactions, measured while it runs.

Read `schedule` (which events are sent, and when), `replay` (the client that sends and requests on time), `baselines`,
`sittings` (hit rates by time since the previous event), `summary`, then `demo`.
"""
