"""`freshet recommend --batch`: a row for each user, once, whatever comes between."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from freshet.v1 import gateway_pb2

from services.cli import batch
from tests.unit.cli.gateway_on_loopback import MemoryGateway, serving
from tests.unit.cli.shell import run

USERS = [f"user-{number}" for number in range(2_300)]


class OneForEach(MemoryGateway):
    """Answers that differ by user; `before` may refuse, wait or change what is answered."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.calls, self.lock = "model-1", 0, threading.Lock()
        self.metadata: dict[str, str] = {}

    def before(self, call: int, answer: gateway_pb2.RecommendResponse, context: Any) -> None:
        """Nothing."""

    def Recommend(self, request: Any, context: Any) -> Any:
        with self.lock:
            self.calls += 1
            call = self.calls
        self.metadata = dict(context.invocation_metadata())
        answer = super().Recommend(request, context)
        answer.model_version, answer.index_version = self.model, f"index-{request.user_id}"
        answer.items[0].item_id = f"for-{request.user_id}"
        self.before(call, answer, context)
        return answer


def command(users: Path, out: Path, target: str, *more: str) -> list[str]:
    return ["recommend", "--batch", str(users), "--out", str(out), "--gateway", target, "--k", "2", "--json", *more]


def ran(gateway: "OneForEach", status: int, users: Path, out: Path, *more: str) -> dict[str, Any]:
    """The command's JSON, once it ended with this status."""
    with serving(gateway) as target:
        result = run(*command(users, out, target, *more))
    assert result.exit_code == status, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def written(path: Path, users: list[Any], kind: pa.DataType | None = None) -> Path:
    pq.write_table(pa.table({"user_id": pa.array(users, kind), "other": list(range(len(users)))}), path)
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_each_user_has_the_live_answer_once_in_the_order_given(tmp_path: Path) -> None:
    users = written(tmp_path / "users.parquet", ["b", "a", "b", "c"])
    gateway = OneForEach()
    assert ran(gateway, 0, users, tmp_path / "out.parquet", "--deny-items", "7")["users"] == 3
    found = rows(tmp_path / "out.parquet")
    assert [row["user_id"] for row in found] == ["b", "a", "c"]
    assert found[1] == {
        "user_id": "a",
        "item_ids": ["for-a", "661"],
        "scores": [0.9, 0.8],
        "source": "mol",
        "model_version": "model-1",
        "index_version": "index-a",
        "state_source": "stored",
        "state_partition": 3,
        "state_offset": 41,
        "absence_bucket": 0,
        "certificate": "bounded",
        "gap": 0.0125,
        "degradations": [],
    }
    assert gateway.metadata["freshet-priority"] == "background"
    assert gateway.asked[0].filter.exclude_seen
    assert list(gateway.asked[0].filter.deny_item_ids) == ["7"]
    assert not (tmp_path / "out.parquet.parts").exists()


def test_killed_it_goes_on_and_ends_with_the_table_of_an_undisturbed_run(tmp_path: Path) -> None:
    users = written(tmp_path / "users.parquet", USERS)
    out = tmp_path / "out.parquet"

    class Slow(OneForEach):
        def before(self, call: int, answer: Any, context: Any) -> None:
            if 1_400 < call < 1_500:
                time.sleep(0.2)

    ran(OneForEach(), 0, users, tmp_path / "undisturbed.parquet")
    gateway = Slow()
    with serving(gateway) as target:
        killed = subprocess.Popen(
            [sys.executable, "-m", "services.cli", *command(users, out, target)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        while gateway.calls < 1_410:
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert not out.exists()
        asked = gateway.calls
    assert ran(gateway, 0, users, out)["parts_found"] == 1
    assert gateway.calls - asked == len(USERS) - batch.PART
    assert rows(out) == rows(tmp_path / "undisturbed.parquet")


def test_busy_answers_are_asked_again(tmp_path: Path) -> None:
    class Busy(OneForEach):
        def before(self, call: int, answer: Any, context: Any) -> None:
            if call == 1:
                answer.degradations.append(gateway_pb2.DEGRADATION_BUSY)
            if call in (2, 3):
                context.set_trailing_metadata((("retry-after-ms", "20"),))
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")

    gateway = Busy()
    ran(gateway, 0, written(tmp_path / "users.parquet", ["a", "b"]), tmp_path / "out.parquet")
    assert gateway.calls == 5
    assert [row["degradations"] for row in rows(tmp_path / "out.parquet")] == [[], []]


def test_a_gateway_that_stays_away_ends_it_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_PATIENCE_S", 0.1)
    users, out = written(tmp_path / "users.parquet", USERS[:1_100]), tmp_path / "out.parquet"

    class Away(OneForEach):
        is_away = True

        def before(self, call: int, answer: Any, context: Any) -> None:
            if call > 1_050 and self.is_away:
                context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    gateway = Away()
    ran(gateway, 3, users, out)
    assert not out.exists()
    gateway.is_away = False
    ran(gateway, 0, users, out)
    assert [row["item_ids"][0] for row in rows(out)] == [f"for-{user}" for user in USERS[:1_100]]


def test_another_model_midway_ends_it_and_a_later_run_too(tmp_path: Path) -> None:
    # By user, not by call: a call that is repeated on a slow machine counts twice.
    after = {f"for-{user}" for user in USERS[1_000:]}

    class Switched(OneForEach):
        def before(self, call: int, answer: Any, context: Any) -> None:
            if answer.items[0].item_id in after:
                answer.model_version = "model-2"

    users, out = written(tmp_path / "users.parquet", USERS[:1_100]), tmp_path / "out.parquet"
    for _ in range(2):
        assert "model-1 and model-2" in ran(Switched(), 1, users, out)["error"]
    assert not out.exists()


def test_parts_of_another_batch_are_not_taken(tmp_path: Path) -> None:
    users, out = written(tmp_path / "users.parquet", ["a"]), tmp_path / "out.parquet"

    class Refuses(OneForEach):
        def before(self, call: int, answer: Any, context: Any) -> None:
            context.abort(grpc.StatusCode.INTERNAL, "a bug")

    ran(Refuses(), 1, users, out)
    assert "another batch" in ran(OneForEach(), 2, users, out, "--include-seen")["error"]
    ran(OneForEach(), 0, users, out)


@pytest.mark.parametrize(
    ("users", "kind", "says"),
    [
        ([1, 2], None, "user_id is int64; allowed: string"),
        (["a", ""], None, "row 1: user_id='' allowed: 1 to 128 bytes"),
        (["a", None], None, "row 1: user_id=None allowed: 1 to 128 bytes"),
        (["ä" * 65], None, "allowed: 1 to 128 bytes"),
        ([], pa.string(), "has no rows"),
    ],
)
def test_users_that_nobody_can_be_are_refused_before_anything_is_sent(
    tmp_path: Path, users: list[Any], kind: pa.DataType | None, says: str
) -> None:
    gateway, path = OneForEach(), written(tmp_path / "users.parquet", users, kind)
    assert says in ran(gateway, 2, path, tmp_path / "out.parquet")["error"]
    assert gateway.calls == 0


def test_a_table_without_the_column_or_none_at_all_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": ["a"]}), tmp_path / "users.parquet")
    (tmp_path / "text.parquet").write_text("user_id\na\n")
    for name in ("users", "text", "none"):
        report = ran(OneForEach(), 2, tmp_path / f"{name}.parquet", tmp_path / "out")
        assert "allowed: a Parquet table with a column user_id" in report["error"]
