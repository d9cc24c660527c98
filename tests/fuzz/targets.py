"""All targets of a campaign."""

from campaign import Target
from files import file_targets
from records import record_targets
from rpcs import rpc_targets


def all_targets() -> list[Target]:
    """RPCs, records of topics, files."""
    return [*rpc_targets(), *record_targets(), *file_targets()]
