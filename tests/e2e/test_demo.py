"""The demo itself, small, as a person runs it: a process of its own, the real components, its summary and its manners.

Two runs in one state folder: one that ends well, and one that is interrupted in the middle of the stream.
"""

import csv
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.offline.demo.plan import ReplayResult, read
from services.stack import Ports, Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_EVENTS = 1_000
CONTENDERS = ("model", "model_with_token", "frozen_state", "item_knn", "recent_popularity", "popularity")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulated people's interactions as anybody's CSV file."""
    people = simulate(
        SimulatorConfig(
            num_users=300, num_items=400, num_topics=16, mean_events_per_user=40, max_events_per_user=120, seed=7
        )
    )
    path = tmp_path_factory.mktemp("table") / "people.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp", "rating", "title"])
        for user, item, when, value in zip(people.users, people.items, people.timestamps, people.values, strict=True):
            writer.writerow(
                [people.user_ids[user], people.item_ids[item], int(when), float(value), people.titles[item]]
            )
    return path


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "state"


@pytest.fixture(scope="module")
def port_offset() -> int:
    """An offset at which nobody listens, and every port is outside of what outgoing connections get (32768-60999)."""
    offsets = list(range(11_000, 13_600, 50))
    random.shuffle(offsets)
    return next(offset for offset in offsets if not any(Ports.default(offset=offset).taken()))


def demo(*arguments: str, state_dir: Path, port_offset: int) -> list[str]:
    command = [sys.executable, "-m", "services.cli", "demo", "--state", str(state_dir)]
    return [*command, "--port-offset", str(port_offset), *arguments]


def nothing_runs(state_dir: Path) -> bool:
    return not any(part.running for part in Stack(state_dir).status())


@pytest.fixture(scope="module")
def summary(table: Path, state_dir: Path, port_offset: int) -> dict:
    arguments = ("--data", str(table), "--events", str(NUM_EVENTS), "--rate", "100", "--epochs", "1", "--json")
    command = demo(*arguments, state_dir=state_dir, port_offset=port_offset)
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_record_is_accounted_for_exactly(summary: dict) -> None:
    events = summary["events"]
    assert events["sent"] == events["applied"] + events["dead_lettered"]
    assert events["applied"] == NUM_EVENTS
    assert events["dead_lettered"] == events["malformed_sent"] == 2
    assert events["duplicates"] == events["duplicates_sent"] == 2
    assert events["adds_up"]


def test_the_summary_has_the_promised_keys_and_lies_beside_its_plots(summary: dict, state_dir: Path) -> None:
    assert json.loads((state_dir / "demo" / "summary.json").read_text(encoding="utf-8")) == summary
    assert set(summary) >= {"dataset", "components", "seconds"}
    for key, names in {
        "events": ("sent", "applied", "dead_lettered", "duplicates"),
        "hit_rate_at_10": CONTENDERS,
        "recommend_ms": ("p50", "p95", "p99"),
        "stages_ms": ("queue", "encode", "first_stage", "transport"),
        "freshness_ms": ("p50", "p99"),
    }.items():
        for name in names:
            assert isinstance(summary[key][name], int | float), (key, name)
    for name in ("hit_rate.png", "latency.png"):
        assert (state_dir / "demo" / name).read_bytes().startswith(b"\x89PNG")


def test_one_event_in_five_was_predicted_and_answered(summary: dict) -> None:
    assert summary["recommend_ms"]["calls"] == NUM_EVENTS / 5
    assert summary["recommend_with_token_ms"]["calls"] == NUM_EVENTS / 5
    assert summary["answers"]["errors"] == {}
    assert summary["freshness_ms"]["samples"] > 0
    assert summary["freshness_ms"]["unreflected"] == 0


def test_a_token_is_honoured_or_the_answer_says_that_it_is_not_and_why(summary: dict, state_dir: Path) -> None:
    answers = read(ReplayResult, state_dir / "demo" / "result.json").predictions_with_token
    failed = [one for one in answers if not one.token_honoured]
    assert [one for one in answers if "DEGRADATION_TOKEN_NOT_HONOURED" in one.degradations] == failed
    # A busy machine has some: a part gave up, which is a degradation of its own, or the gateway waited for most of 2 s.
    assert [one for one in failed if len(one.degradations) == 1 and one.latency_ms < 1_800] == []
    assert summary["answers"]["tokens_honoured"] == len(answers) - len(failed) >= NUM_EVENTS / 10


def test_hits_are_also_counted_by_sitting_and_the_kinds_add_up(summary: dict) -> None:
    by_sitting = summary["hit_rate_at_10_by_sitting"]
    assert sum(part["events"] for part in by_sitting.values()) == NUM_EVENTS / 5
    assert all(part.keys() >= set(CONTENDERS) for part in by_sitting.values())
    best = summary["over_best_baseline"]
    rates = summary["hit_rate_at_10"]
    assert rates[best["baseline"]] == max(rates[name] for name in ("item_knn", "recent_popularity", "popularity"))


def test_it_says_what_really_ran(summary: dict) -> None:
    versions = summary["components"]
    assert versions["Apache Kafka"].startswith("4.")
    assert versions["Triton Inference Server"].startswith("2.")
    assert versions["Redis"]


def test_nothing_is_left_running(summary: dict, state_dir: Path) -> None:
    assert nothing_runs(state_dir)


def test_an_interrupted_demo_stops_its_stack(summary: dict, table: Path, state_dir: Path, port_offset: int) -> None:
    """By SIGTERM, which the demo handles as Python handles SIGINT."""
    arguments: Sequence[str] = ("--data", str(table), "--events", "5000", "--rate", "50", "--epochs", "1", "--reuse")
    command = demo(*arguments, state_dir=state_dir, port_offset=port_offset)
    record = state_dir / "demo" / "plan.json"
    record.unlink(missing_ok=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        deadline = time.monotonic() + 180
        while not record.exists():
            assert running.poll() is None, running.communicate()[0][-4000:]
            assert time.monotonic() < deadline, "the stream did not begin"
            time.sleep(0.1)
        running.terminate()
        said, _ = running.communicate(timeout=120)
    assert running.returncode == 130, said[-4000:]
    assert "Traceback" not in said
    assert nothing_runs(state_dir)
