"""`freshet quickstart`: from nothing running to an answer, an event that changes it, and lines that can be copied."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.stack import Ports, Stack

# The first one on a machine trains, and fetches Kafka.
pytestmark = pytest.mark.timeout(900)
# Every port is outside of what outgoing connections get (32768-60999), and none is one of the demo's tests.
_OFFSETS = range(10_000, 11_000, 50)
_MOST_MB = 1_100


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    Stack(tmp_path / "state").down()


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_answers_reflects_an_event_and_prints_lines_that_work(state: Path) -> None:
    offset = next(offset for offset in _OFFSETS if not any(Ports.default(offset=offset).taken()))
    asked = ("quickstart", "--state", str(state), "--port-offset", str(offset))
    told = json.loads(run(*asked, "--json"))
    assert [len(told["before"]), len(told["after"])] == [5, 5]
    assert all(row["title"] for row in told["before"] + told["after"])
    # Candidates come from the index and from popular items; the model scores both.
    assert [told["before"][0]["source"], told["after"][0]["source"]] == ["mol", "mol"]
    assert {row["source"] for row in told["before"] + told["after"]} <= {"mol", "popular"}
    assert told["token_honoured"]
    assert told["before"] != told["after"]
    assert not {*told["liked"], told["liked_next"]} & {row["title"] for row in told["after"]}
    assert sorted(told["memory_mb"]) == ["encoder", "gateway", "kafka", "redis"]
    assert sum(told["memory_mb"].values()) < _MOST_MB

    recommend, record, explain = (json.loads(_curl(line)) for line in told["curl"])
    assert [item["itemId"] for item in recommend["items"]] == [row["item_id"] for row in told["after"][:3]]
    assert recommend["stateSource"] == "stored"
    assert record["receipts"][0]["eventId"]
    assert explain["similarity"]["title"] == told["after"][0]["title"]

    # A second one takes the same system, and is another person.
    text = run(*asked)
    assert told["model_version"] in text
    assert told["user_id"] not in text
    assert f"Stop:  freshet down --state {shlex.quote(str(state))}" in text
    run("down", "--state", str(state))
    assert not [part.name for part in Stack(state).status() if part.running]


def _curl(line: str) -> str:
    return subprocess.run(["curl", "-s", *shlex.split(line)[1:]], capture_output=True, text=True, check=True).stdout
