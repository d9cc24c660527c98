"""Undo, forget and re-encode on the whole stack: what the gateway reports is what every process holds."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc, refresher_pb2, refresher_pb2_grpc

from services.algorithms.bundles.model_bundle import load_bundle
from services.encoder.config import EncoderSettings
from services.offline.backfill.jobs import run_reattribution
from services.stack import Stack

pytestmark = pytest.mark.integration

NOW_S = int(time.time())


@pytest.fixture
def gateway(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.address("gateway")) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


@pytest.fixture
def refresher(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.address("refresher")) as channel:
        yield refresher_pb2_grpc.RefresherServiceStub(channel)


def eventually(claim: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"did not come true within {seconds:.0f} s"
        time.sleep(0.05)


def becomes(expected: int, read: Callable[[], int | None], seconds: float = 120.0) -> None:
    """Wait until `read` says so. Generous: the refresher may have to find its broker again after the fault tests."""
    deadline = time.monotonic() + seconds
    while (seen := read()) != expected:
        assert time.monotonic() < deadline, f"{seen} and not {expected} after {seconds:.0f} s"
        time.sleep(0.05)


def record(gateway: Any, stack: Stack, user: str, count: int, first: int = 0) -> None:
    item_ids = load_bundle(stack.bundle).item_ids
    request = gateway_pb2.RecordInteractionsRequest()
    for number in range(first, first + count):
        event = request.interactions.add(
            event_id=f"{user}-{number}", user_id=user, item_id=item_ids[number], type="rating", value=5.0
        )
        event.event_time.seconds = NOW_S - 1_000 + number
    gateway.RecordInteractions(request, timeout=30)


def preview(gateway: Any, user: str) -> dict[str, int]:
    return dict(gateway.ForgetUser(gateway_pb2.ForgetUserRequest(user_id=user, preview=True), timeout=10).found)


def test_a_user_is_undone_forgotten_and_counts_again(stack: Stack, gateway: Any, refresher: Any) -> None:
    user, other = (f"{name}-{time.time_ns()}" for name in ("ann", "bob"))
    record(gateway, stack, other, 12)
    record(gateway, stack, user, 12)
    # The first event has nothing before it, so it is attributed to nothing.
    becomes(11, lambda: preview(gateway, user).get("summed_interactions"))
    becomes(12, lambda: preview(gateway, user).get("history_events"))

    gateway.UndoInteraction(gateway_pb2.UndoInteractionRequest(user_id=user, event_id=f"{user}-7"), timeout=10)
    becomes(10, lambda: preview(gateway, user).get("summed_interactions"))
    becomes(11, lambda: preview(gateway, user).get("history_events"))
    becomes(11, lambda: preview(gateway, other).get("summed_interactions"))

    answer = gateway.ForgetUser(gateway_pb2.ForgetUserRequest(user_id=user), timeout=60)
    assert answer.is_applied
    assert (answer.found["history_events"], answer.found["summed_interactions"]) == (11, 10)
    assert set(answer.left.values()) == {0}
    assert preview(gateway, other)["summed_interactions"] == 11
    known = gateway.Recommend(gateway_pb2.RecommendRequest(user_id=user, k=5), timeout=10)
    assert known.state_source == "none"

    record(gateway, stack, user, 3, first=20)
    becomes(2, lambda: preview(gateway, user).get("summed_interactions"))
    becomes(3, lambda: preview(gateway, user).get("history_events"))


def test_everything_encoded_again_by_the_same_model_changes_no_sum(stack: Stack, gateway: Any, refresher: Any) -> None:
    user = f"cat-{time.time_ns()}"
    record(gateway, stack, user, 6)
    becomes(5, lambda: preview(gateway, user).get("summed_interactions"))
    seen: list[tuple[int, int]] = []
    settings = EncoderSettings(bundle=stack.bundle, kafka_bootstrap=stack.kafka_bootstrap)
    report = run_reattribution(settings, lambda done, total: seen.append((done, total)))
    assert report.attributions >= 5
    assert seen[-1] == (report.records, report.records)
    status = refresher.GetStatus(refresher_pb2.GetStatusRequest(), timeout=10)
    ends = {held.partition: held.end_offset for held in status.partitions}
    eventually(
        lambda: all(
            held.folded_offset >= ends[held.partition] - 1
            for held in refresher.GetStatus(refresher_pb2.GetStatusRequest(), timeout=10).partitions
        )
    )
    assert preview(gateway, user)["summed_interactions"] == 5
    # A second run, by the command, finds it done.
    command = [Path(sys.executable).parent / "freshet", "backfill-attributions", "--bundle", stack.bundle, "--json"]
    done = subprocess.run(
        [*command, "--state", stack.place.state.root], capture_output=True, text=True, timeout=120, check=True
    )
    again = json.loads(done.stdout)
    assert (again["model_version"], again["attributions"]) == (report.model_version, 0)
    assert again["skipped"] == again["records"] >= report.records


def test_items_that_are_put_reach_every_reader(gateway: Any) -> None:
    request = gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id=f"new-{n}", title="New") for n in range(50)])
    assert gateway.PutItems(request, timeout=10).num_written == 50
