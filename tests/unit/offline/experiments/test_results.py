"""Results of an experiment equal those of plain loops over the log, wherever the log lies."""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import duckdb
import numpy as np
import pytest
from fakes.stream import MemoryTopics

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.experiments import Arm, Experiment, Experiments
from services.contracts.topics.exposures import EXPOSURES, Exposure, encode_exposure
from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.offline.archive.exposures import archive_exposures, exposure_files
from services.offline.archive.writing import ArchiveInteractions
from services.offline.experiments.log import opened_log
from services.offline.experiments.over_time import document
from services.offline.experiments.results import Metric, Results, counts_by, results
from services.platform.errors import InvalidRequest, PreconditionFailed

KEY = b"key"
HOUR, DAY = 3_600_000, 24 * 3_600_000
T0 = 1_790_000_000_000
ITEMS = [f"i{number}" for number in range(40)]
ARMS = (Arm(name="control", share=0.5), Arm(name="better", share=0.5))
EXPERIMENT = Experiments().created(Experiment(name="one", arms=ARMS, salt="s")).started("one", T0).find("one")


@dataclass
class World:
    """Exposures and interactions of simulated people, who take more of what the arm `better` shows."""

    seed: int = 0
    people: int = 600
    lift: float = 0.3
    exposures: list[tuple[str, Exposure]] = field(default_factory=list)
    interactions: list[Interaction] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        for number in range(self.people):
            user = f"user-{number}"
            (assigned,) = Experiments(experiments={"one": EXPERIMENT}).assigned(user, {})
            assert assigned.arm is not None
            taste = rng.random()
            for past in range(rng.randrange(4)):
                self.take(user, rng.choice(ITEMS), T0 - (past + 1) * DAY, "click")
            first = T0 + rng.randrange(3 * DAY)
            for answer in range(rng.randrange(1, 4)):
                shown = first + answer * 5 * HOUR
                items = rng.sample(ITEMS, 5)
                exposure_id = f"e-{number}-{answer}"
                self.exposures.append(
                    (
                        user,
                        Exposure(
                            exposure_id=exposure_id,
                            shown_ms=shown,
                            surface=rng.choice(["recommend", "search"]),
                            model_version="m1",
                            item_ids=items,
                            scores=[0.0] * 5,
                            sources=["mol"] * 5,
                            assignments=(("one", assigned.arm.name, 0.5), ("other", "x", 0.1)),
                        ),
                    )
                )
                for item in items:
                    if rng.random() < 0.15 * taste + (self.lift * 0.1 if assigned.arm.name == "better" else 0):
                        named = exposure_id if rng.random() < 0.7 else ""
                        self.take(user, item, shown + rng.randrange(HOUR), rng.choice(["click", "buy"]), named)

    def take(self, user: str, item: str, at_ms: int, kind: str, exposure_id: str = "") -> None:
        self.interactions.append(
            Interaction(
                user_id=user,
                item_id=item,
                event_id=f"x-{len(self.interactions)}",
                type=kind,
                value=float(len(self.interactions) % 7),
                event_time_ms=at_ms,
                exposure_id=exposure_id,
            )
        )

    def topics(self) -> tuple[MemoryTopics, MemoryTopics]:
        shown, taken = MemoryTopics({EXPOSURES: 2}), MemoryTopics({INTERACTIONS: 2})
        for user, exposure in self.exposures:
            write(shown, EXPOSURES, pseudonym_of(user, KEY), encode_exposure(exposure), exposure.shown_ms)
        for one in self.interactions:
            write(taken, INTERACTIONS, one.user_id, encode_interaction(one), T0 + 9 * DAY)
        return shown, taken


def write(topics: MemoryTopics, topic: str, key: str, value: bytes, at_ms: int) -> None:
    topics.write(topic, key.encode(), value, partition=sum(key.encode()) % 2, written_ms=at_ms)


@contextmanager
def log_of(
    shown: MemoryTopics, taken: MemoryTopics, archive: Path | None = None, forgets: tuple[Forget, ...] = ()
) -> Iterator[duckdb.DuckDBPyConnection]:
    readers = {"exposures": shown.reader(), "interactions": taken.reader()}
    with opened_log(archive, **readers, forgets=forgets, key=KEY) as log:
        yield log


def told(log: duckdb.DuckDBPyConnection, *metrics: Metric, now_ms: int = T0 + 9 * DAY) -> Results:
    return results(log, EXPERIMENT, metrics or (Metric(type="click"),), now_ms=now_ms, tuned_for=500)


def per_user(world: World, kind: str, now_ms: int) -> dict[str, dict[str, float]]:
    """Arm -> user -> how often, by plain loops; users whose day is over."""
    first: dict[str, int] = {}
    arms: dict[str, str] = {}
    for user, exposure in world.exposures:
        first[user] = min(first.get(user, exposure.shown_ms), exposure.shown_ms)
        arms[user] = exposure.assignments[0][1]
    counts: dict[str, dict[str, float]] = defaultdict(dict)
    for user, arm in arms.items():
        if first[user] + DAY <= now_ms:
            counts[arm][user] = sum(
                1.0
                for one in world.interactions
                if one.user_id == user and one.type == kind and first[user] <= one.event_time_ms < first[user] + DAY
            )
    return counts


def test_users_counts_and_means_are_those_of_plain_loops() -> None:
    world = World()
    now_ms = T0 + 2 * DAY
    with log_of(*world.topics()) as log:
        found = told(log, Metric(type="click"), Metric(type="buy"), now_ms=now_ms)
    for kind in ("click", "buy"):
        expected = per_user(world, kind, now_ms)
        most = {kind: found.capped[kind].limit} if kind in found.capped else {}
        for arm, users in expected.items():
            values = np.minimum(list(users.values()), most.get(kind, np.inf))
            assert found.arms[arm].counted == len(users)
            assert found.means[kind, arm] == pytest.approx(values.mean())
    shown = defaultdict(list)
    for _, exposure in world.exposures:
        shown[exposure.assignments[0][1]].append(exposure)
    assert {arm: one.exposures for arm, one in found.arms.items()} == {arm: len(all_) for arm, all_ in shown.items()}
    assert {arm: one.shown for arm, one in found.arms.items()} == {arm: 5 * len(all_) for arm, all_ in shown.items()}
    assert sum(one.users for one in found.arms.values()) == world.people
    assert (found.in_two_arms, found.unknown_exposures) == (0, 0)


def test_the_archive_the_topics_and_both_say_the_same(tmp_path: Path) -> None:
    world = World()
    shown, taken = world.topics()
    with log_of(shown, taken) as log:
        expected = told(log), counts_by(log, EXPERIMENT, "day"), counts_by(log, EXPERIMENT, "position")
    early = World()
    early.exposures, early.interactions = world.exposures[:700], world.interactions[:900]
    for part in (early, world):  # a second run goes on where the first one ended
        some_shown, some_taken = part.topics()
        archive_exposures(tmp_path, some_shown.reader(), {})
        ArchiveInteractions(tmp_path, log=some_taken.reader(), forgets=NoForgets(), file_bytes=20_000).run()
        with log_of(shown, taken, tmp_path) as log:
            assert (told(log), counts_by(log, EXPERIMENT, "day"), counts_by(log, EXPERIMENT, "position")) == expected
    assert {path.parent.name for path in exposure_files(tmp_path)} == {
        f"day={day}"
        for day in {str(np.datetime64(one.shown_ms, "ms").astype("datetime64[D]")) for _, one in world.exposures}
    }


def test_unreadable_records_are_left_out_archived_or_not(tmp_path: Path) -> None:
    world = World(people=100)
    with log_of(*world.topics()) as log:
        expected = told(log)
    shown, taken = world.topics()
    for unreadable in (b"", b"\xff\x00", b"%1000d" % 7):  # the last is a message, without an exposure id
        write(shown, EXPOSURES, "key", unreadable, T0)
        write(taken, INTERACTIONS, "key", unreadable, T0)
    with log_of(shown, taken) as log:
        assert told(log) == expected
    archive_exposures(tmp_path, shown.reader(), {})
    ArchiveInteractions(tmp_path, log=taken.reader(), forgets=NoForgets(), file_bytes=20_000).run()
    with log_of(shown, taken, tmp_path) as log:
        assert told(log) == expected


class NoForgets:
    """Nobody was forgotten."""

    def read(self) -> list[object]:
        return []

    def close(self) -> None:
        """Nothing is open."""


def test_a_killed_archive_run_leaves_nothing_that_counts_twice(tmp_path: Path) -> None:
    shown, taken = World().topics()
    archive_exposures(tmp_path, shown.reader(), {})
    left = exposure_files(tmp_path)[0]
    beyond = left.with_name("0-000000900000-000000900010.parquet")
    beyond.write_bytes(left.read_bytes())
    with log_of(shown, taken, tmp_path) as log, log_of(shown, taken) as plain:
        assert told(log) == told(plain)
    archive_exposures(tmp_path, shown.reader(), {})
    assert not beyond.exists()


def test_a_forgotten_user_counts_for_nothing_whether_archived_or_not(tmp_path: Path) -> None:
    world = World()
    shown, taken = world.topics()
    forget = Forget(forget_id="f", user_id="user-7", up_to={0: 10**6, 1: 10**6}, requested_ms=T0 + 9 * DAY)
    without = World()
    without.exposures = [one for one in world.exposures if one[0] != "user-7"]
    without.interactions = [one for one in world.interactions if one.user_id != "user-7"]
    with log_of(*without.topics()) as log:
        expected = told(log)
    with log_of(shown, taken, forgets=(forget,)) as log:
        assert told(log) == expected
    archive_exposures(tmp_path, shown.reader(), {})
    with log_of(shown, taken, tmp_path, (forget,)) as log:
        assert told(log) == expected
    archive_exposures(tmp_path, shown.reader(), {pseudonym_of("user-7", KEY): T0 + 9 * DAY})
    with log_of(shown, taken, tmp_path) as log:
        found = told(log)
        assert sum(one.users for one in found.arms.values()) == world.people - 1
        gone = pseudonym_of("user-7", KEY)
        assert log.execute("SELECT count(*) FROM exposures WHERE user_key = ?", [gone]).fetchone() == (0,)


def test_attribution_by_exposure_id_else_by_item_within_the_window() -> None:
    world = World(people=0)
    for user, arm in (("ann", "control"), ("bob", "better")):
        for answer, (at, items) in enumerate([(T0, ["i1", "i2"]), (T0 + HOUR, ["i2", "i3"])]):
            exposure = Exposure(
                exposure_id=f"{user}-{answer}",
                shown_ms=at,
                surface=["recommend", "search"][answer],
                model_version="m1",
                item_ids=items,
                scores=[0.0] * 2,
                sources=["mol"] * 2,
                assignments=(("one", arm, 0.5),),
                first_position=1 + 10 * answer,
            )
            world.exposures.append((user, exposure))
    world.take("ann", "i2", T0 + 2 * HOUR, "click", "ann-0")  # named, though a newer answer shows it
    world.take("ann", "i2", T0 + 2 * HOUR, "click")  # the newer answer's
    world.take("ann", "i2", T0 + HOUR // 2, "click")  # before the newer one: the older one's
    world.take("ann", "i9", T0 + 2 * HOUR, "click")  # never shown
    world.take("bob", "i3", T0 + 30 * HOUR, "click")  # after the window
    world.take("bob", "i1", T0 - HOUR, "click")  # before it was shown
    with log_of(*world.topics()) as log:
        surfaces = counts_by(log, EXPERIMENT, "surface")
        positions = counts_by(log, EXPERIMENT, "position")
        wider = counts_by(log, EXPERIMENT, "surface", window=timedelta(days=2))
        with pytest.raises(InvalidRequest, match="by='colour' allowed: one of day, surface"):
            counts_by(log, EXPERIMENT, "colour")
    assert [(one["arm"], one["surface"], one["events"]) for one in surfaces] == [
        ("control", "recommend", 2),
        ("control", "search", 1),
    ]
    assert [(one["arm"], one["position"], one["events"]) for one in positions] == [
        ("control", 2, 2),
        ("control", 11, 1),
    ]
    assert ("better", "search", 1) in [(one["arm"], one["surface"], one["events"]) for one in wider]


def test_a_lift_is_found_and_a_broken_guardrail_named() -> None:
    world = World(seed=3, people=3_000, lift=1.5)
    with log_of(*world.topics()) as log:
        found = told(log, Metric(type="click"))
        harm = results(
            log,
            Experiment(name="one", arms=ARMS[::-1], salt="s"),
            [Metric(type="click", margin=-0.02)],
            now_ms=T0 + 9 * DAY,
            tuned_for=3_000,
        )
        risen = told(log, Metric(type="click", margin=0.02))
    assert risen.broken == [("click", "better")]
    assert found.differences["click", "better"].estimate.low > 0
    assert found.differences["click", "better"].adjusted < 0.001
    assert harm.broken == [("click", "control")]
    assert found.broken == []


def test_an_arm_that_a_tester_chose_counts_for_nothing() -> None:
    world, without = World(people=200), World(people=200)
    for user, one in world.exposures[:40]:
        forced = (("one", "control", 0.0),)
        world.exposures.append((user, replace(one, exposure_id=f"forced {one.exposure_id}", assignments=forced)))
    with log_of(*world.topics()) as log, log_of(*without.topics()) as plain:
        assert told(log) == told(plain)


def test_an_operators_looks_in_the_console_count_for_nothing() -> None:
    world = World()
    with log_of(*world.topics()) as log:
        expected = told(log), counts_by(log, EXPERIMENT, "surface")
    at_home = [(user, replace(one, context={"surface": "home"})) for user, one in world.exposures]
    looks = [
        (user, replace(one, exposure_id=f"look-{one.exposure_id}", context={"surface": "console"}))
        for user, one in (*world.exposures, ("an operator", world.exposures[0][1]))
    ]
    world.exposures = [*at_home, *looks]
    with log_of(*world.topics()) as log:
        assert (told(log), counts_by(log, EXPERIMENT, "surface")) == expected


def test_the_consoles_document_says_what_each_look_said_and_what_each_part_says() -> None:
    world = World()
    for place, (user, one) in enumerate(world.exposures):
        device = "mobile's" if sum(user.encode()) % 2 else "desktop"
        world.exposures[place] = user, replace(one, context={"device": device, "app": "web", "visitor": "v"})
    metrics = (Metric(type="click"), Metric(type="buy", of_values=True))
    asked = {"horizon": timedelta(days=1), "past": timedelta(days=14), "tuned_for": 500}
    with log_of(*world.topics()) as log:
        made = document(log, EXPERIMENT, metrics, now_ms=T0 + 9 * DAY, **asked)
        whole, *parts = made["parts"]
        for now_ms in {row["at_ms"] for row in whole["rows"]}:
            then = results(log, EXPERIMENT, metrics, now_ms=now_ms, **asked)
            for row in (row for row in whole["rows"] if row["at_ms"] == now_ms):
                key = row["metric"], row["arm"]
                assert row["users"] == then.arms[row["arm"]].counted
                assert row.get("mean") == pytest.approx(then.means.get(key), rel=0.02)
                assert ("low" in row) == (key in then.differences)
        last = {(row["metric"], row["arm"]): row for row in whole["rows"] if row["at_ms"] == T0 + 9 * DAY}
        now = told(log, *metrics)
    assert {key: row["mean"] for key, row in last.items()} == pytest.approx(now.means)
    for key, one in now.differences.items():
        assert [last[key][name] for name in ("difference", "low", "high")] == pytest.approx(
            [one.estimate.mean, one.estimate.low, one.estimate.high]
        )
    assert {part["name"] for part in parts} == {
        "surface recommend",
        "surface search",
        "device mobile's",
        "device desktop",
    }
    for part in parts:
        shown = [
            one
            for _, one in world.exposures
            if part["name"] in (f"surface {one.surface}", f"device {one.context['device']}")
        ]
        assert {arm: of["exposures"] for arm, of in part["arms"].items()} == {
            arm: sum(one.assignments[0][1] == arm for one in shown) for arm in ("control", "better")
        }


def test_nothing_is_said_where_the_sample_ratio_is_broken() -> None:
    world = World(people=2_000)
    lost = {f"user-{number}" for number in range(0, 2_000, 3)}
    world.exposures = [one for one in world.exposures if not (one[0] in lost and one[1].assignments[0][1] == "better")]
    with log_of(*world.topics()) as log:
        found = told(log)
    assert found.is_ratio_broken
    assert found.differences == {}
    more = replace(found, in_two_arms=1_200, unknown_exposures=3).remarks
    assert more[0].startswith("The arms' users do not fit their shares (p ")
    assert more[-2:] == [
        "1,200 users were shown two arms, and are left out.",
        "3 interactions name exposures that are not in the log.",
    ]


def test_a_script_counts_with_the_limit_and_is_named_and_undone_events_do_not_count() -> None:
    world = World(people=2_000)
    robot = next(user for user, one in world.exposures if one.assignments[0][1] == "better")
    for _ in range(10_000):
        world.take(robot, "i1", {u: e.shown_ms for u, e in world.exposures}[robot] + 1, "click")
    with log_of(*world.topics()) as log:
        found = told(log)
    assert found.capped["click"].users >= 1
    assert found.capped["click"].limit < 20
    cap = found.capped["click"]
    assert found.remarks == [f"{cap.users} users had more than {cap.limit:g} of click, and count with that."]
    assert found.means["click", "better"] < 2
    plain = World(people=300)
    clicked = next(one for one in plain.interactions if one.type == "click" and one.exposure_id)
    plain.interactions.append(
        Interaction(user_id=clicked.user_id, event_id="u", undoes_event_id=clicked.event_id, event_time_ms=T0 + 9 * DAY)
    )
    without = World(people=300)
    without.interactions.remove(clicked)
    with log_of(*plain.topics()) as one, log_of(*without.topics()) as other:
        assert told(one) == told(other)


def test_bad_metrics_and_unexposed_experiments_are_named() -> None:
    with log_of(*World(people=50).topics()) as log:
        with pytest.raises(InvalidRequest, match="metric='purchase' allowed: a type that occurred: buy, click"):
            told(log, Metric(type="purchase"))
        with pytest.raises(PreconditionFailed, match="nobody was exposed to experiment 'two'"):
            results(log, Experiment(name="two", arms=ARMS), [Metric(type="click")], now_ms=T0, tuned_for=500)


def test_interleaving_says_whose_items_people_took() -> None:
    world = World(people=0)
    rng = random.Random(1)
    for number in range(400):
        teams = rng.choice([(0, 1), (1, 0)])
        exposure = Exposure(
            exposure_id=f"e{number}", shown_ms=T0, surface="recommend", model_version="m1", item_ids=["a", "b"],
            scores=[0.0] * 2, sources=["mol"] * 2, assignments=(("one", "", 1.0),), teams=teams,
        )  # fmt: skip
        world.exposures.append((f"user-{number}", exposure))
        team = 1 if rng.random() < 0.65 else 0
        world.take(f"user-{number}", "ab"[teams.index(team)], T0 + 1, "click", f"e{number}")
    mixed = Experiment(name="one", arms=ARMS, interleaved=True)
    with log_of(*world.topics()) as log:
        asked = {"now_ms": T0 + 9 * DAY, "horizon": timedelta(days=1), "past": timedelta(days=14), "tuned_for": 400}
        found = results(log, mixed, [Metric(type="click")], **asked)
        whole = document(log, mixed, [Metric(type="click")], **asked)["parts"][0]
    assert found.preferred is not None
    assert [one.partition(" [")[0] for one in whole["remarks"]] == [
        f"Preference for better, from -1 to 1: {found.preferred.mean:+.3f}"
    ]
    assert found.preferred.low > 0
    assert found.preferred.mean == pytest.approx(0.3, abs=0.1)
    assert found.arms[""].users == 400
