"""`freshet rebuild` beside a running stack: the digests of a fold from zero are the live ones."""

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import gateway_pb2, gateway_pb2_grpc, refresher_pb2, refresher_pb2_grpc

from services.algorithms.bundles.model_bundle import load_bundle
from services.stack import Stack
from tests.unit.cli.shell import facts

pytestmark = pytest.mark.integration


def rebuild(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = facts("rebuild", "--state", stack.place.state.root)
    return found


def record(stack: Stack, users: int) -> int:
    """Ratings of so many users; returns how many attributions they make (a first one is preceded by no state)."""
    item_ids = load_bundle(stack.bundle).item_ids
    now_s = int(time.time())
    stub_type: Any = gateway_pb2_grpc.GatewayServiceStub
    with grpc.insecure_channel(stack.address("gateway")) as channel:
        for user in range(users):
            request = gateway_pb2.RecordInteractionsRequest()
            for number in range(6):
                event = request.interactions.add(
                    user_id=f"rebuild-{user}", item_id=item_ids[(7 * user + number) % 40], type="rating", value=5.0
                )
                event.event_time.seconds = now_s - 100 + number
            stub_type(channel).RecordInteractions(request, timeout=30)
    return 5 * users


def wait_until_whole(stub: Any, at_least: int) -> None:
    """All eight partitions are held, and nothing comes any more."""
    deadline, before = time.monotonic() + 60, (-1, -1)
    while True:
        partitions = stub.GetStatus(refresher_pb2.GetStatusRequest(), timeout=10).partitions
        now = (len(partitions), sum(one.counts["folded"] for one in partitions))
        if now == before and now[0] == 8 and now[1] >= at_least:
            return
        assert time.monotonic() < deadline, (now, at_least)
        before = now
        time.sleep(1)


def test_a_rebuild_beside_the_running_refresher_ends_in_its_digests(stack: Stack, tmp_path: Path) -> None:
    stub_type: Any = refresher_pb2_grpc.RefresherServiceStub
    with grpc.insecure_channel(stack.address("refresher")) as channel:
        status = stub_type(channel).GetStatus(refresher_pb2.GetStatusRequest(), timeout=10)
        # What tests before this one wrote may still be on its way.
        expected = sum(one.counts["folded"] for one in status.partitions) + record(stack, 40)
        wait_until_whole(stub_type(channel), expected)
    report = rebuild(stack)
    assert not report["kept"]
    assert [row["equal"] for row in report["partitions"]] == [True] * 8
    assert report["counts"]["folded"] >= expected
    # Killed and started again it stands where it stood.
    stack.kill("refresher")
    stack.start("refresher")
    with grpc.insecure_channel(stack.address("refresher")) as channel:
        # The lease of the one that was killed runs out first.
        wait_until_whole(stub_type(channel), 0)
    assert [row["equal"] for row in rebuild(stack)["partitions"]] == [True] * 8
