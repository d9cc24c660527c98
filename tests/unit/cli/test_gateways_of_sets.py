"""`freshet model` waits until every gateway applies the record and has the set, and names what one lacks."""

import os
from typing import Any

import pytest
from freshet.v1 import gateway_pb2

from services.cli.output import CommandError, ExitStatus
from services.cli.staging import wait_for_gateways
from tests.unit.cli.gateway_on_loopback import MemoryGateway


@pytest.mark.parametrize(
    ("known", "problem"),
    [
        ({"revision": 6}, "it applies revision 6, not 7"),
        ({"revision": 7}, "it knows no set 'next'"),
        ({"revision": 8, "ready": False, "problem": "no candidates"}, "set 'next': no candidates"),
        ({"revision": 8, "ready": True}, ""),
    ],
)
def test_a_gateway_that_lacks_a_set_is_named(gateway: MemoryGateway, known: dict[str, Any], problem: str) -> None:
    answer = gateway_pb2.GetVersionSetsResponse(revision=known.pop("revision"))
    if known:
        answer.sets.add(**known).set.name = "next"
    gateway.version_sets = answer
    target = os.environ["FRESHET_GATEWAY"]
    if not problem:
        wait_for_gateways([target], 7, 0, ready="next")
        return
    with pytest.raises(CommandError) as refusal:
        wait_for_gateways([target], 7, 0, ready="next")
    assert (str(refusal.value), refusal.value.status) == (f"gateway {target}: {problem}", ExitStatus.UNAVAILABLE)
