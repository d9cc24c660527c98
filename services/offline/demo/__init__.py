"""`freshet demo`: the whole system at work on real people's interactions, measured while it runs.

Read in this order: `schedule` (who sends what, when), `replay` (the outside client that sends and asks on a clock),
`baselines`, `sittings` (what the answers are worth), `summary`, and `demo`,
which puts the steps together.
"""
