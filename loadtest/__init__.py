"""Load tests from outside: they know only the protos and an address.

`python -m loadtest steady --help` (or `freshet loadtest steady --help`). A scenario is one file in scenarios/.
"""
