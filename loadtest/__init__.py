"""Load tests from outside: they know the protos and an address, and nothing else of the house.

`python -m loadtest steady --help` (or `freshet loadtest steady --help`). A scenario is one file in scenarios/.
"""
