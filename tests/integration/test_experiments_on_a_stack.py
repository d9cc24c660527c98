"""An experiment on the whole stack, by its commands: simulated people look and click while every part is killed and
restarted. Each has one arm, exposures are what clients received, and results are those of a replay of the topics."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc
import pytest
from outside import Outside, event, until

from services.cli.output import ExitStatus
from services.contracts.operation_log import Control
from services.contracts.pseudonyms import pseudonym_key, pseudonym_of
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.experiments import OPERATIONS
from services.contracts.topics.exposures import EXPOSURES, Exposure, decode_exposure
from services.contracts.topics.interactions import INTERACTIONS, Interaction
from services.encoder.config import EncoderSettings
from services.offline.datasets.interactions import Interactions
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.offline.experiments.sample_ratio import p_value
from services.platform.errors import InvalidRequest
from services.platform.stream.records import SourceRecord
from services.stack import Stack
from services.user_state.merging import Arrival, read_arrival
from tests.unit.cli.shell import facts, refused

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.timeout(600)]

PEOPLE, PAST, K, THREADS = 160, 8, 5, 3
HORIZON_H = 0.002
PUBLISHED_WITHIN_S = 60
# Exposures wait a second in the gateway's memory; a kill of the gateway or of Kafka loses those.
LOST_WITHIN_S = 3.0


@dataclass
class Shown:
    """An answer as its client received it."""

    user: str
    arm: str
    items: list[str]
    at_s: float


@dataclass
class People:
    """Look at lists and click, each thread for its own people, until `stop`."""

    outside: Outside
    likes: dict[str, set[str]]
    shown: dict[str, Shown] = field(default_factory=dict)
    clicks: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    acknowledged_s: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def living(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._live, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        yield
        self.stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _live(self, number: int) -> None:
        rng, people = random.Random(number), list(self.likes)[number::THREADS]
        while not self.stop.is_set():
            for user in people:
                self._look(user, rng)
                self.stop.wait(0.02)

    def _look(self, user: str, rng: random.Random) -> None:
        try:
            answer = self.outside.recommend(user, K, context={"surface": "home"})
        except grpc.RpcError:
            self.failed.append(user)
            self.stop.wait(0.1)
            return
        (said,) = answer.assignments
        items = [one.item_id for one in answer.items]
        self.shown[answer.exposure_id] = Shown(user, said.arm, items, time.monotonic())
        for item in items:
            if item in self.likes[user] or rng.random() < 0.1:
                named = answer.exposure_id if rng.random() < 0.7 else ""
                self._click(event(user, item, type="click", event_id=uuid.uuid4().hex, exposure_id=named))

    def _click(self, made: Any) -> None:
        def written() -> bool:
            try:
                self.outside.record(made)
            except grpc.RpcError:
                return False
            return True

        until("the click is acknowledged", written, within_s=60)
        self.clicks[made.event_id] = made.user_id
        self.acknowledged_s = time.monotonic()


def run(stack: Stack, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = facts(*arguments, "--state", stack.place.state.root)
    return found


@contextmanager
def following(stack: Stack, *arguments: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """Run `freshet results --follow`; yield what reads its newest publication."""
    state = stack.place.state
    argv = [sys.executable, "-m", "services.cli", *arguments, "--follow", "--state", str(state.root)]
    path = state.results / f"{arguments[1]}.json"
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            until("results are published", path.exists, PUBLISHED_WITHIN_S)
            yield lambda: json.loads(path.read_bytes())
        finally:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
    assert process.returncode == ExitStatus.INTERRUPTED, said


def records_of(stack: Stack, name: str) -> list[SourceRecord]:
    topic = TopicReader(stack.kafka_bootstrap, name, group_id="test", client_id="test")
    try:
        topic.seek(dict.fromkeys(topic.partitions(), 0))
        return topic.read_to_end()
    finally:
        topic.close()


def exposures_of(stack: Stack) -> Iterator[tuple[SourceRecord, Exposure]]:
    """The topic's readable exposures: other tests write what nobody can read into it."""
    for record in records_of(stack, EXPOSURES):
        with suppress(InvalidRequest):
            yield record, decode_exposure(record.value)


@dataclass
class Replay:
    """What the topics have of an experiment: its exposures with user and arm, and its users' events without doubles."""

    name: str
    users: dict[str, str]
    exposures: list[tuple[str, str, Exposure]] = field(default_factory=list)
    events: dict[tuple[str, str], Interaction] = field(default_factory=dict)

    @classmethod
    def of(cls, stack: Stack, name: str, people: list[str]) -> "Replay":
        """people: whose pseudonyms the exposures have."""
        key = pseudonym_key(EncoderSettings(kafka_bootstrap=stack.kafka_bootstrap))
        replay = cls(name, {pseudonym_of(user, key): user for user in people})
        for record, one in exposures_of(stack):
            for experiment, arm, _ in one.assignments:
                if experiment == name:
                    replay.exposures.append((replay.users[(record.key or b"").decode()], arm, one))
        for record in records_of(stack, INTERACTIONS):
            arrival = read_arrival(record)
            if isinstance(arrival, Arrival) and arrival.interaction.user_id in people:
                found = arrival.interaction
                replay.events.setdefault((found.user_id, found.event_id), found)
        return replay

    @property
    def arms(self) -> dict[str, set[str]]:
        found = defaultdict(set)
        for user, arm, _ in self.exposures:
            found[user].add(arm)
        return found

    def clicks(self) -> list[Interaction]:
        return [one for one in self.events.values() if one.type == "click"]

    def per_user(self, until_ms: int) -> dict[str, list[int]]:
        """Arm -> clicks of each user whose horizon is over, within it."""
        horizon_ms, first = HORIZON_H * 3_600_000, dict[str, int]()
        for user, _, one in self.exposures:
            first[user] = min(one.shown_ms, first.get(user, one.shown_ms))
        found = defaultdict(list)
        for user, (arm, *_) in self.arms.items():
            if first[user] + horizon_ms <= until_ms:
                taken = [one for one in self.clicks() if one.user_id == user]
                found[arm].append(sum(first[user] <= one.event_time_ms < first[user] + horizon_ms for one in taken))
        return found

    def attributed(self) -> Counter[tuple[str, int]]:
        """(arm, position) -> clicks: of the named exposure, else of the user's newest one with the item."""
        by_id = {one.exposure_id: (arm, one) for _, arm, one in self.exposures}
        found: Counter[tuple[str, int]] = Counter()
        for click in self.clicks():
            taken = by_id.get(click.exposure_id)
            if not click.exposure_id:
                before = [
                    (one.shown_ms, arm, one)
                    for user, arm, one in self.exposures
                    if user == click.user_id and one.shown_ms <= click.event_time_ms and click.item_id in one.item_ids
                ]
                taken = max(before, key=lambda each: each[0])[1:] if before else None
            if taken is not None:
                found[taken[0], taken[1].item_ids.index(click.item_id) + 1] += 1
        return found


def past_of(data: Interactions, name: str) -> tuple[list[Any], dict[str, set[str]]]:
    """Events of simulated people an hour ago, and the items that each takes later."""
    past, likes = [], {}
    for row in range(PEOPLE):
        user, items = f"{name}-{row}", [data.item_ids[code] for code in data.items[data.users == row]]
        past += [
            event(user, item, type="click", at=time.time() - 3600 + at, event_id=f"{user}-{at}")
            for at, item in enumerate(items[:PAST])
        ]
        likes[user] = set(items[PAST:])
    return past, likes


def test_kills_of_every_part_move_no_user_and_results_are_a_replays(stack: Stack, tmp_path: Path) -> None:
    name = f"limit-{uuid.uuid4().hex[:8]}"
    file = tmp_path / "experiment.yaml"
    file.write_text(
        f"name: {name}\nlayer: {name}\narms:\n- {{name: control, share: 0.5}}\n"
        "- {name: limited, share: 0.5, max_per_category: 1}\n"
    )
    run(stack, "experiments", "create", str(file))
    assert run(stack, "experiments", "start", name)["state"] == "running"
    started = Control(stack.kafka_bootstrap, OPERATIONS).read().last
    assert started is not None
    people = SimulatorConfig(
        num_users=300, num_items=400, num_topics=16, mean_events_per_user=40, max_events_per_user=120, seed=7
    )
    past, likes = past_of(simulate(people), name)
    expected = {user: started.after.assigned(user, {})[0].arm.name for user in likes}  # type: ignore[union-attr]
    outages: list[tuple[float, float]] = []
    with Outside(stack) as outside:
        for start in range(0, len(past), 500):
            outside.record(*past[start : start + 500])
        until("the gateway answers by the experiment", lambda: outside.recommend(next(iter(likes))).assignments)
        living = People(outside, likes)
        counted = ["results", name, "--metric", "click", "--horizon-hours", str(HORIZON_H)]
        with living.living(), following(stack, *counted) as published:
            until("everybody has looked", lambda: len({one.user for one in living.shown.values()}) == PEOPLE, 60)
            for part in stack.parts:
                killed_s = time.monotonic()
                stack.kill(part)
                stack.start(part)
                if part in ("gateway", "kafka"):
                    outages.append((killed_s - LOST_WITHIN_S, time.monotonic() + LOST_WITHIN_S))
                looks = len(living.shown)
                until(f"people look after {part} is back", lambda so_far=looks: len(living.shown) > so_far + 20)
                assert time.time() - published()["until_ms"] / 1000 <= PUBLISHED_WITHIN_S
            written = len(Replay.of(stack, name, list(likes)).exposures)
            until(
                "the console's results have what the topic had",
                lambda: sum(one["exposures"] for one in published()["parts"][0]["arms"].values()) >= written,
                PUBLISHED_WITHIN_S,
            )
        # The first look of the test itself, and what the gateway still has to write.
        until("the last exposure is in the topic", lambda: _last_is_written(stack, living))
    assert run(stack, "experiments", "stop", name)["state"] == "stopped"
    found = run(stack, *counted)
    assert time.monotonic() - living.acknowledged_s < 60
    replay = Replay.of(stack, name, list(likes))
    assert {user: {one.arm for one in living.shown.values() if one.user == user} for user in likes} == {
        user: {arm} for user, arm in expected.items()
    }
    assert replay.arms == {user: {arm} for user, arm in expected.items()}
    # Each exposure is the answer that its client received, or one that never arrived.
    never = 0
    for user, arm, one in replay.exposures:
        if (answer := living.shown.get(one.exposure_id)) is None:
            never += 1
        else:
            assert (answer.user, answer.arm, answer.items) == (user, arm, list(one.item_ids))
    assert never <= len(living.failed) + 1
    written = {one.exposure_id for _, _, one in replay.exposures}
    lost = {name for name in living.shown if name not in written}
    assert all(any(a <= living.shown[one].at_s <= b for a, b in outages) for one in lost)
    assert {one.event_id: one.user_id for one in replay.clicks() if one.event_id in living.clicks} == living.clicks
    assert len(replay.clicks()) == len(living.clicks) + len(past)
    values = replay.per_user(found["until_ms"])
    shown = [(arm, len(one.item_ids)) for _, arm, one in replay.exposures]
    assert found["arms"] == {
        arm: {
            "users": sum(of == arm for of in expected.values()),
            "counted": len(values[arm]),
            "exposures": sum(of == arm for of, _ in shown),
            "shown": sum(items for of, items in shown if of == arm),
        }
        for arm in ("control", "limited")
    }
    assert found["in_two_arms"] == 0
    users = Counter(expected.values())
    assert found["sample_ratio_p_value"] == pytest.approx(p_value(users, {"control": 0.5, "limited": 0.5}))
    assert found["unknown_exposures"] == sum(one.exposure_id in lost for one in replay.clicks())
    capped = found["capped"].get("click", {"limit": float("inf")})["limit"]
    assert {row["arm"]: row["mean"] for row in found["rows"]} == {
        arm: pytest.approx(fmean(min(one, capped) for one in of)) for arm, of in values.items()
    }
    by = run(stack, *counted, "--by", "position")["rows"]
    attributed = replay.attributed()
    assert {(row["arm"], row["position"]): row["events"] for row in by} == attributed
    _check_off_policy(stack, name, replay, attributed)
    run(stack, "archive", str(tmp_path / "archive"))
    assert run(stack, *counted, "--archive", str(tmp_path / "archive")) == found


def _check_off_policy(stack: Stack, name: str, replay: Replay, attributed: Counter[tuple[str, int]]) -> None:
    """Each person has one arm, by chance, so the arm for all is estimated; no answer had positions for new items."""
    wanted = ["off-policy", "arms", name, "--metric", "click", "--give", "limited"]
    found = run(stack, *wanted)
    gained = sum(count for (arm, _), count in attributed.items() if arm == "limited")
    assert (found["answers"], found["users"]) == (len(replay.exposures), PEOPLE)
    assert found["other"]["IPS"]["mean"] == pytest.approx(gained / 0.5 / len(replay.exposures))
    state = ("--state", str(stack.place.state.root))
    alike = refused(ExitStatus.FAILED, "off-policy", "new-items", "--metric", "click", *state)
    assert "every logged propensity is 1" in alike
    wrong = refused(ExitStatus.USAGE, *wanted, "--give", "tv:limited", *state)
    assert "give='tv:limited' allowed: ARM, or CONTEXT=VALUE:ARM" in wrong


def _last_is_written(stack: Stack, living: People) -> bool:
    last = max(living.shown, key=lambda name: living.shown[name].at_s)
    return last in {one.exposure_id for _, one in exposures_of(stack)}
