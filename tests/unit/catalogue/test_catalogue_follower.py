"""Following the catalogue: when it is ready, what is coalesced, what waits, what is set aside, what begins anew."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from fakes.stream import MemoryTopics
from freshet.v1 import events_pb2
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable.index import IndexFullError, only
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.catalogue import follower as catalogue_follower
from services.catalogue.changes import CatalogueChanges, CatalogueMetrics
from services.catalogue.follower import CatalogueFollower
from services.contracts.topics.index_deltas import INDEX_DELTAS, Batch, IndexDelta, ItemDelta, MemoryDelta, encode
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.platform.errors import DependencyUnavailable
from services.platform.stream import topic_follower
from services.platform.stream.follower import TurnClock
from services.platform.stream.records import SourceRecord

MODEL = "m1"


def turns(follower: CatalogueFollower, count: int) -> None:
    """Turns as the thread takes them."""
    for _ in range(count):
        try:
            follower.step()
        except Exception as exc:
            follower.fail(exc)


class Items:
    """What is served, as a log of calls. `room` False refuses."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.room, self.misfits = True, ()

    def apply(
        self,
        position: int,
        changes: Sequence[ItemDelta],
        *,
        mark: str,
        newest_recorded_ms: int | None,
        lag_s: float | None,
    ) -> Sequence[str]:
        if not self.room:
            raise IndexFullError("max_bytes=1")
        self.calls.append((position, [one.item_id for one in changes]))
        return self.misfits

    def describe(self, descriptions: Sequence[CatalogueItem]) -> None:
        self.calls.append([one.item_id for one in descriptions])
        if not self.room:
            raise IndexFullError("max_bytes=1")

    def reset(self) -> None:
        self.calls.append("reset")


class Memory:
    def __init__(self) -> None:
        self.ids: set[str] = set()

    def apply(self, changes: Sequence[MemoryDelta]) -> int:
        self.ids |= {one.entry_id for one in changes if not one.dropped}
        self.ids -= {one.entry_id for one in changes if one.dropped}
        return 0

    def clear(self) -> None:
        self.ids.clear()


class Scene:
    def __init__(self, per_poll: int = 100) -> None:
        self.topics, self.items, self.memory = (
            MemoryTopics({INDEX_DELTAS: 1, ITEMS: 1}, per_poll=per_poll),
            Items(),
            Memory(),
        )
        self.registry = CollectorRegistry()
        self.ready = 0
        changes = CatalogueChanges(self.items, CatalogueMetrics("test", self.registry), remembered=self.memory)
        self.follower = CatalogueFollower(
            self.topics, changes, model_version=MODEL, on_ready=self._ready, poll_s=0.0, backoff_s=0.001,
        )  # fmt: skip
        self._offset = 0

    def _ready(self) -> None:
        self.ready += 1

    def delta(self, item_id: str, *, last: bool = True, model: str = MODEL, recorded_ms: int | None = None) -> int:
        self._offset += 1
        change = ItemDelta(item_id=item_id, components=np.array([[0.6, 0.8]], dtype=np.float32))
        return self.write(change, last=last, model=model, recorded_ms=recorded_ms)

    def write(
        self, change: ItemDelta | MemoryDelta, *, last: bool = True, model: str = MODEL, recorded_ms: int | None = None
    ) -> int:
        record = IndexDelta(
            model_version=model, partition=0, offset=self._offset, batch=0 if not last else self._offset,
            last_of_batch=last, change=change, newest_recorded_ms=recorded_ms,
        )  # fmt: skip
        return self.topics.write(INDEX_DELTAS, record.key, encode(record))

    def describe(self, item_id: str) -> int:
        return self.topics.write(ITEMS, item_id.encode(), encode_item(CatalogueItem(item_id=item_id)))

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"freshet_test_{name}", labels) or 0.0

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.follower.step()


class Following:
    """A live catalogue of two items, (1, 2) each, that follows."""

    def __init__(self, topics: MemoryTopics) -> None:
        base = Catalogue(
            model_version=MODEL,
            item_ids=["i0", "i1"],
            titles=["", ""],
            categories=[(), ()],
            states=ItemStates(components=np.array([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=np.float32)),
            pair_gate=None,
        )
        self.catalogue = LiveCatalogue(base, build=only(BruteForce))
        self.registry = CollectorRegistry()
        changes = CatalogueChanges(self.catalogue, CatalogueMetrics("test", self.registry))
        self.follower = CatalogueFollower(topics, changes, model_version=MODEL, poll_s=0.0)

    def content(self) -> tuple[str, dict[str, float]]:
        """The newest version's name, and what each of its items scores."""
        query = QueryStates(components=np.array([[[0.6, 0.8]]], dtype=np.float32))
        served = self.catalogue.served
        top = served.version.search(query, 10)
        return served.name, dict(zip(top.item_ids[0], top.scores[0].tolist(), strict=False))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_it_is_ready_once_both_ends_are_reached_and_not_before() -> None:
    scene = Scene(per_poll=2)
    for number in range(5):
        scene.delta(f"a{number}")
        scene.describe(f"b{number}")
    scene.steps(2)
    assert scene.ready == 0
    assert scene.follower.is_behind
    scene.steps(2)
    assert scene.ready == 1
    assert not scene.follower.is_behind


def test_catching_up_serves_each_poll_as_one_batch_and_then_each_batch_by_itself(scene: Scene) -> None:
    for number in range(3):
        scene.delta(f"a{number}")
    scene.steps()
    assert scene.items.calls == [(2, ["a0", "a1", "a2"])]
    scene.delta("b0")
    scene.delta("b1")
    scene.steps()
    assert scene.items.calls[1:] == [(3, ["b0"]), (4, ["b1"])]
    assert scene.count("deltas_offset") == 4


def test_before_it_is_ready_many_polls_are_one_batch_and_later_each_poll_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_follower, "_GATHERED", 5)
    scene = Scene(per_poll=3)
    for number in range(8):
        scene.delta(f"a{number % 4}")
    scene.steps(3)
    assert scene.items.calls == [(5, ["a0", "a1", "a2", "a3"]), (7, ["a2", "a3"])]
    assert scene.ready == 1
    scene.follower.fail(DependencyUnavailable("gone"))
    for number in range(6):
        scene.delta(f"b{number}")
    scene.steps(2)
    assert scene.items.calls[2:] == [(10, ["b0", "b1", "b2"]), (13, ["b3", "b4", "b5"])]


def test_without_kafka_it_is_not_ready_however_long_that_takes(scene: Scene) -> None:
    scene.delta("a")
    scene.topics.down = True
    for _ in range(10):
        with pytest.raises(DependencyUnavailable) as caught:
            scene.follower.step()
        scene.follower.fail(caught.value)
    assert (scene.ready, scene.items.calls) == (0, [])
    scene.topics.down = False
    scene.steps()
    assert (scene.ready, scene.items.calls) == (1, [(0, ["a"])])


def test_a_lost_connection_is_taken_up_where_it_was_and_nothing_is_served_twice(scene: Scene) -> None:
    scene.delta("a")
    scene.describe("a")
    scene.steps()
    scene.follower.fail(DependencyUnavailable("gone"))
    scene.delta("b")
    scene.steps()
    assert scene.items.calls == [["a"], (0, ["a"]), (1, ["b"])]


def test_a_tombstone_is_taken_as_dropped_where_compaction_took_the_record_that_dropped(scene: Scene) -> None:
    scene.delta("a")
    scene.write(MemoryDelta(entry_id="e", item_id="a", components=np.full((1, 2), 0.5, dtype=np.float32)))
    scene.steps()
    for change in (ItemDelta(item_id="a", dropped=True), MemoryDelta(entry_id="e", dropped=True)):
        scene.write(change)
    for key in (b"m1/item/a", b"m1/memory/e", b"m2/item/a"):
        scene.topics.write(INDEX_DELTAS, key, None)
    scene.topics.compact(INDEX_DELTAS)
    scene.steps()
    assert scene.items.calls == [(1, ["a"]), (4, ["a"]), (5, [])]
    assert scene.memory.ids == set()
    assert scene.count("changes_total", kind="dropped_item") == 1
    assert scene.count("changes_total", kind="unreadable_delta") == 0


def test_a_malformed_item_is_set_aside_with_its_reason_and_the_next_is_taken(scene: Scene) -> None:
    scene.topics.write(ITEMS, b"x", b"\xff\xff")
    scene.describe("a")
    scene.steps()
    assert [(letter.offset, letter.reason) for letter in scene.topics.dead_letters] == [
        (0, "value='2 unreadable bytes' allowed: a whole Item message")
    ]
    assert scene.items.calls == [["a"]]
    assert scene.count("changes_total", kind="unreadable_item") == 1


def test_an_item_that_cannot_be_set_aside_now_is_read_again(scene: Scene) -> None:
    scene.steps()
    scene.topics.write(ITEMS, b"x", b"\xff\xff")
    scene.describe("a")
    real_poll = scene.topics.poll

    def poll_then_lose(timeout_ms: int, max_records: int | None = None, *, only: str = "") -> Sequence[SourceRecord]:
        found = real_poll(timeout_ms, max_records, only=only)
        scene.topics.down = True
        return found

    scene.topics.poll = poll_then_lose  # type: ignore[method-assign]
    with pytest.raises(DependencyUnavailable) as caught:
        scene.follower.step()
    scene.follower.fail(caught.value)
    scene.topics.down, scene.topics.poll = False, real_poll  # type: ignore[method-assign]
    scene.steps()
    assert [letter.offset for letter in scene.topics.dead_letters] == [0]
    assert scene.items.calls == [["a"]]


def test_deltas_without_room_wait_in_order_while_items_go_on(scene: Scene) -> None:
    scene.steps()
    scene.items.room = False
    scene.delta("a")
    scene.delta("b")
    scene.steps(2)
    scene.delta("c")
    scene.describe("w")
    scene.steps()
    assert scene.items.calls == [["w"]]
    assert scene.count("index_full") == 1
    assert scene.count("deltas_offset") == -1
    scene.items.room = True
    scene.steps()
    assert scene.items.calls == [["w"], (0, ["a"]), (1, ["b"]), (2, ["c"])]
    assert scene.count("index_full") == 0


def test_deltas_are_read_no_further_while_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_follower, "_MAX_PENDING", 64)
    scene = Scene(per_poll=50)
    scene.steps()
    scene.items.room = False
    for number in range(200):
        scene.delta(f"a{number}")
    scene.steps(6)
    assert scene.topics.positions(INDEX_DELTAS) == {0: 100}
    scene.items.room = True
    scene.steps(6)
    assert scene.items.calls == [(number, [f"a{number}"]) for number in range(200)]


def test_a_topic_made_anew_means_the_bundle_and_then_what_the_new_one_says() -> None:
    for reconnects in (False, True):
        scene = Scene()
        scene.write(MemoryDelta(entry_id="e", item_id="a", components=np.full((1, 2), 0.5, dtype=np.float32)))
        scene.delta("a")
        scene.delta("b")
        scene.steps()
        assert scene.memory.ids == {"e"}
        for (log,) in scene.topics.logs.values():
            log.clear()
        scene._offset = 0
        scene.delta("c")
        if reconnects:
            scene.follower.fail(DependencyUnavailable("gone"))
        scene.steps(2)
        assert scene.items.calls[1:] == ["reset", (0, ["c"])]
        assert scene.memory.ids == set()


def test_states_longer_than_1_are_passed_over_and_the_others_served() -> None:
    writer = Scene()
    live = Following(writer.topics)
    writer.delta("i1")
    record = IndexDelta(
        model_version=MODEL, partition=0, offset=2, batch=2, last_of_batch=False,
        change=ItemDelta(item_id="i0", components=np.array([[0.0, 1.0]], dtype=np.float32)),
    )  # fmt: skip
    message = events_pb2.IndexDelta.FromString(encode(record))
    for components in ([3e38, 0.0], [1.0, 0.1]):
        message.item.components = np.array(components, dtype="<f4").tobytes()
        writer.topics.write(INDEX_DELTAS, record.key, message.SerializeToString())
    writer.delta("new")
    live.follower.step()
    assert live.content()[1] == pytest.approx({"i1": 1.0, "new": 1.0, "i0": 0.6})
    kind = {"kind": "unreadable_delta"}
    assert live.registry.get_sample_value("freshet_test_changes_total", kind) == 2


@pytest.mark.parametrize("refilled", ["less", "less, and reconnects", "as far, and reconnects", "further"])
def test_items_made_anew_are_read_again_and_states_stay(refilled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that followed all the while serves under each name what one that starts then serves under it."""
    monkeypatch.setattr(topic_follower, "_LOOK_EVERY_S", 0.0)
    topics = MemoryTopics({INDEX_DELTAS: 1, ITEMS: 1})
    live, restarted = Following(topics), Following(topics.reader())
    writer = Scene()
    writer.topics = topics
    for item_id in ("i1", "new"):
        writer.delta(item_id)
    for item_id in ("i0", "other", "new", "i1"):
        writer.describe(item_id)
    live.follower.step()
    before = live.content()
    assert before[1].keys() == {"i0", "i1", "new"}
    topics.logs[ITEMS] = [[]]
    topics.write(ITEMS, b"i1", encode_item(CatalogueItem(item_id="i1", withdrawn=True)))
    for item_id in ["i0", "other", "new", "further"][: {"l": 0, "a": 3, "f": 4}[refilled[0]]]:
        writer.describe(item_id)
    if "reconnects" in refilled:
        live.follower.fail(DependencyUnavailable("gone"))
    live.follower.step()
    live.follower.step()
    writer.delta("i0")
    live.follower.step()
    restarted.follower.step()
    assert live.content() == restarted.content()
    assert live.content()[1].keys() == {"i0", "new"}
    assert not live.follower.is_behind


@pytest.mark.parametrize("reconnects", [False, True])
def test_deltas_made_anew_leave_what_items_say(reconnects: bool, scene: Scene) -> None:
    scene.describe("b")
    scene.delta("a")
    scene.delta("a")
    scene.steps()
    scene.topics.logs[INDEX_DELTAS] = [[]]
    scene.delta("c")
    if reconnects:  # then it is as long as the one before
        scene.delta("c")
        scene.follower.fail(DependencyUnavailable("gone"))
    scene.steps(2)
    scene.describe("d")
    scene.steps()
    assert scene.items.calls == [["b"], (1, ["a"]), "reset", (int(reconnects), ["c"]), ["d"]]
    assert scene.follower.next_item == 2
    assert not scene.follower.is_behind


def test_where_deltas_are_not_followed_items_still_are(scene: Scene) -> None:
    follower = CatalogueFollower(
        scene.topics, scene.follower._listener, model_version=MODEL, on_ready=scene._ready, follows_deltas=False,
        poll_s=0.0,
    )  # fmt: skip
    scene.delta("a")
    scene.describe("b")
    follower.step()
    assert (scene.items.calls, scene.ready) == ([["b"]], 1)


def test_lag_is_observed_for_what_was_followed_live_alone(scene: Scene) -> None:
    now_ms = round(time.time() * 1000)
    scene.delta("a", recorded_ms=now_ms - 60_000)
    scene.steps()
    assert scene.count("index_lag_seconds_count") == 0
    scene.delta("b", recorded_ms=now_ms - 2_000)
    scene.steps()
    assert scene.count("index_lag_seconds_count") == 1
    assert 1.9 <= scene.count("index_lag_seconds_sum") < 59


def test_the_age_of_the_followers_last_good_turn_is_the_clocks_whether_it_fails_or_hangs() -> None:
    now_s, registry = [0.0], CollectorRegistry()
    metrics = CatalogueMetrics("test", registry)
    changes = CatalogueChanges(Items(), metrics)
    follower = CatalogueFollower(
        MemoryTopics({INDEX_DELTAS: 1, ITEMS: 1}),
        changes,
        model_version=MODEL,
        poll_s=0.0,
        backoff_s=0.0,
        turns=TurnClock(clock=lambda: now_s[0]),
    )
    metrics.watch_turns(follower.turns)
    follower.step()
    now_s[0] += 10
    follower.fail(DependencyUnavailable("away"))
    now_s[0] += 10
    assert registry.get_sample_value("freshet_test_turn_age_seconds") == 20
    follower.step()
    assert registry.get_sample_value("freshet_test_turn_age_seconds") == 0


def test_a_failed_merge_is_reported_once_and_so_is_its_recovery_whether_changes_come_or_not() -> None:
    class Merge:
        error: Exception | None = None

    def failed() -> float | None:
        return registry.get_sample_value("freshet_test_merge_failed")

    registry, merge, items = CollectorRegistry(), Merge(), Items()
    changes = CatalogueChanges(items, CatalogueMetrics("test", registry), merges=[merge])
    batch = Batch(offset=0, deltas=(), newest_recorded_ms=None)
    with capture_logs() as logs:
        assert changes.apply(batch, is_live=True)
        assert failed() == 0
        merge.error = MemoryError("no room")
        assert failed() == 1
        assert changes.apply(batch, is_live=True)
        merge.error = MemoryError("still no room")
        assert changes.apply(batch, is_live=True)
        merge.error = None
        assert failed() == 0
        assert changes.apply(batch, is_live=True)
        assert changes.apply(batch, is_live=True)
        merge.error = ValueError("something else")
        assert changes.apply(batch, is_live=True)
    assert [entry["event"] for entry in logs] == ["merge_failed", "merge_recovered", "merge_failed"]
    assert failed() == 1


def test_the_thread_follows_until_it_is_stopped(scene: Scene) -> None:
    scene.delta("a")
    scene.follower.start()
    deadline = time.monotonic() + 10
    while not scene.items.calls and time.monotonic() < deadline:
        time.sleep(0.001)
    scene.follower.stop()
    assert scene.items.calls == [(0, ["a"])]
    assert scene.ready == 1


def test_an_item_that_fails_alone_is_set_aside_and_the_others_are_described(scene: Scene) -> None:
    describe = scene.items.describe

    def fails_on_one(descriptions: Sequence[CatalogueItem]) -> None:
        if any(one.item_id == "poison" for one in descriptions):
            raise KeyError("a bug")
        describe(descriptions)

    scene.items.describe = fails_on_one  # type: ignore[method-assign]
    for item_id in ("a", "poison", "b"):
        scene.describe(item_id)
    with capture_logs():
        turns(scene.follower, 8)
    assert [(letter.offset, letter.reason) for letter in scene.topics.dead_letters] == [(1, "internal error: KeyError")]
    assert scene.count("changes_total", kind="poison_item") == 1
    assert scene.items.calls[-1] == ["b"]
    assert scene.follower.next_item == 3
    assert scene.follower.turns.failures == 0


def test_a_batch_of_deltas_that_fails_waits_under_the_position_before_it(scene: Scene) -> None:
    applied, scene.items.apply = scene.items.apply, None  # type: ignore[assignment, method-assign]
    scene.delta("a")
    scene.describe("b")
    with capture_logs():
        turns(scene.follower, 10)
        assert scene.items.calls[0] == ["b"]
        scene.items.apply = applied  # type: ignore[method-assign]
        turns(scene.follower, 2)
    assert scene.items.calls[-1] == (0, ["a"])


def test_other_models_and_unreadable_records_are_counted_and_passed_over(scene: Scene) -> None:
    scene.delta("x", model="m2")
    scene.topics.write(INDEX_DELTAS, b"m1/item/y", b"\xff\xff")
    scene.topics.write(INDEX_DELTAS, None, None)
    scene.delta("a")
    scene.steps()
    assert scene.items.calls == [(3, ["a"])]
    assert scene.count("changes_total", kind="other_model") == 2
    assert scene.count("changes_total", kind="unreadable_delta") == 1
    assert scene.count("changes_total", kind="item") == 1


def test_states_that_do_not_fit_the_model_are_counted(scene: Scene) -> None:
    scene.items.misfits = ("a",)
    scene.delta("a")
    scene.steps()
    assert scene.count("changes_total", kind="misfit") == 1
