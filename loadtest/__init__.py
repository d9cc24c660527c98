"""Load tests from outside: they know only the protos and an address (`freshet loadtest steady --help`)."""
