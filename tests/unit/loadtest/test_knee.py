"""The compiled sender against a real gRPC server, and what the knee makes of its answers."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from freshet.v1 import gateway_pb2

from loadtest import knee
from loadtest.compiled import OK, PlannedCall, SenderError, build, send
from loadtest.knee import Knee

RECOMMEND = "/freshet.v1.GatewayService/Recommend"


@pytest.fixture(scope="session")
def program() -> Path:
    return build()


def asks(*due_s: float) -> list[PlannedCall]:
    return [
        PlannedCall(
            due_s=due, method=RECOMMEND, request=gateway_pb2.RecommendRequest(user_id=str(row), k=1).SerializeToString()
        )
        for row, due in enumerate(due_s)
    ]


def test_calls_are_sent_when_they_are_due_and_answers_come_back_in_order(program: Path, small_gateway: Any) -> None:
    wrong = PlannedCall(due_s=0.5, method="/freshet.v1.GatewayService/Unknown", request=b"")
    calls = [*asks(0.0, 0.1, 0.4), wrong, *asks(0.6)]
    answers = send(program, f"127.0.0.1:{small_gateway.port}", calls)
    assert answers.status.tolist() == [OK, OK, OK, 12, OK]
    assert [len(gateway_pb2.RecommendResponse.FromString(raw).items) for raw in answers.answer] == [1, 1, 1, 0, 1]
    assert (answers.sent_s >= [call.due_s for call in calls]).all()
    assert (answers.latency_s > 0).all()
    assert answers.processor_s > 0
    assert {request.user_id for request in small_gateway.recommended} == {"0", "1", "2"}


def test_a_stall_shows_in_every_call_that_was_due_while_it_lasted(program: Path, small_gateway: Any) -> None:
    small_gateway.stall_after_calls, small_gateway.stall_s = 1, 0.5
    answers = send(program, f"127.0.0.1:{small_gateway.port}", asks(0.0, 0.1, 0.2), timeout_s=5)
    assert (answers.latency_s >= [0.5, 0.4, 0.3]).all()


def test_what_cannot_be_sent_is_said(program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FRESHET_TLS_CA", str(tmp_path / "absent"))
    with pytest.raises(SenderError, match="absent"):
        send(program, "127.0.0.1:1", asks(0.0))


def test_what_is_over_time_is_told_for_each_part(
    program: Path, small_gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knee, "PHASES", (("knee", 1.0, 2.0), ("2x", 2.0, 2.0)))
    (tmp_path / "items.txt").write_text("a\nb\n")
    small_gateway.fail_every = 4
    calls = knee._Calls(
        argparse.Namespace(
            items=tmp_path / "items.txt",
            num_users=5,
            seed=0,
            k=1,
            events=2.5,
            target=f"127.0.0.1:{small_gateway.port}",
        )
    )
    found = Knee(alone_p99_ms=1.0, bound_ms=50.0, knee_per_s=20.0)
    knee._over_time(calls, found)
    first, second = found.phases
    assert second.offered_per_s > 1.3 * first.offered_per_s
    # The small gateway's answers carry a mark, each; every fourth call is refused.
    for phase in found.phases:
        assert phase.goodput_per_s == 0
        assert phase.failed["RESOURCE_EXHAUSTED"] == pytest.approx(phase.offered_per_s * 2 / 4, abs=1.5)
        assert phase.marked_per_s == pytest.approx(phase.offered_per_s * 3 / 4, abs=1)
        assert phase.usual_again_s is None
    assert sum(found.seconds["events acknowledged"]) == len(calls.acknowledged) == len(small_gateway.recorded)
    assert {event_id for _, _, event_id in calls.acknowledged} == {
        one.event_id for request in small_gateway.recorded for one in request.interactions
    }
    small_gateway.fail_every = 0
    assert calls.not_honoured() == 0
    assert knee.plot([("", found)], tmp_path / "knee.png").stat().st_size > 1_000
    (tmp_path / "knee.json").write_text(json.dumps(asdict(found)))
    assert knee.read_knee(tmp_path / "knee.json") == found
    with pytest.raises(ValueError, match=r"--before=.*items\.txt"):
        knee.read_knee(tmp_path / "items.txt")
    assert "never" in knee.table(found)


def test_it_is_usual_again_where_a_seconds_answers_are_good() -> None:
    due = np.arange(0, 4, 0.05)
    assert knee._usual_again(due, due >= 1.5, 4.0) == 1.5
    assert knee._usual_again(due, due >= 0, 4.0) == 0.0
    assert knee._usual_again(due, due < 0, 4.0) is None


def test_failures_have_their_names() -> None:
    assert knee._failures([0, 8, 8, 255]) == {"RESOURCE_EXHAUSTED": 2, "NOT_SENT": 1}


PAGES = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"


@pytest.mark.parametrize("name", ["knee", "knee-before"])
def test_the_published_tables_are_their_json(name: str) -> None:
    page = (PAGES / "overload.md").read_text(encoding="utf-8")
    assert knee.table(knee.read_knee(PAGES / f"{name}.json")) in page
