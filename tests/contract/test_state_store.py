"""One suite for the encoder's state store port: in memory always, on a real Redis with the integration tests.

Keys, expiry and scripts are checked on Redis beside it; what the gateway reads back, in test_user_states.py.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from suites import either, eventually

from services.algorithms.items import popularity
from services.contracts import stored_history
from services.contracts.stored_history import RecentId, StoredEvent
from services.contracts.wire import PackedQueryState
from services.encoder.ports import UserReader
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import Conflict, DependencyUnavailable, PreconditionFailed
from services.platform.redis_clients import open_client
from services.stack import Ports
from services.user_state import layout as state_layout
from services.user_state.layout import forgets_key, home_of
from services.user_state.ports import Store
from services.user_state.reader import StateReader
from services.user_state.values import (
    AdvanceStep,
    ModelState,
    PopularityStep,
    StoredState,
    UserKeys,
    UserUpdate,
)
from services.user_state.writer import StateWriter

MODEL = "model-1"
NUM_PARTITIONS = 8
# Epochs of three lives of a store.
EARLIER, NOW, LATER = "earlier-8", "now-8", "later-8"
ANN_HOME = state_layout.home_of("ann", NOW)
ANN_HISTORY = state_layout.history_key(ANN_HOME)
EVENTS = [StoredEvent(1_000 + n, 3, 40 + n, 2**63 + n, f"item-{n}", "rating", 0.5 * n, f"e{n}") for n in range(3)]


@pytest.fixture(params=either("redis"))
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore(max_seen=5)
        return
    url = request.getfixturevalue("redis_url")
    with open_client(url, timeout_s=5) as client:
        client.flushall()
    writer = StateWriter(url, max_seen=5)
    yield writer
    writer.close()


@pytest.fixture
def epoch(store: Store) -> str:
    return store.ensure_epoch(NUM_PARTITIONS)[0]


def state(offset: int = 42, model: str = MODEL) -> StoredState:
    packed = PackedQueryState(
        model_version=model, components=b"\x00\x3c" * 8, gate=b"\x00\x40" * 2, num_components=2, component_width=4
    )
    return StoredState(query_state=packed, partition=3, offset=offset, event_time_ms=1_002, applied_ms=9_000)


def update(user_id: str = "ann", expected: bytes = b"", **changes: Any) -> UserUpdate:
    fields: dict[str, Any] = {
        "positions": {3: 42},
        "events": EVENTS,
        "recent": [RecentId(2**64 - 1, 3, 41, 1), RecentId(7, 3, 42, 0)],
        "seen_times": {"item-1": 1_001},
        "state": state(),
        "state_change": "set",
    }
    return UserUpdate(user_id=user_id, model_version=MODEL, expected=expected, **(fields | changes))


def lose_epoch(store: Store) -> None:
    if isinstance(store, MemoryStore):
        store._epoch = None
    else:
        store._redis.delete(state_layout.EPOCH_KEY)  # type: ignore[attr-defined]


def test_an_epoch_is_made_once(store: Store) -> None:
    assert store.epoch() is None
    epoch, made = store.ensure_epoch(NUM_PARTITIONS)
    assert made
    assert store.ensure_epoch(NUM_PARTITIONS) == (epoch, False)
    assert store.epoch() == epoch


@pytest.mark.parametrize("user_id", ["ann", "{}", "a}b{c", "100%", "日本語", "x" * 128])
def test_what_is_written_is_read_again(store: Store, user_id: str, epoch: str) -> None:
    store.apply([update(user_id)], epoch, {})
    found = store.load_users([user_id, "other"], epoch)
    assert found[user_id].events == EVENTS
    assert found[user_id].recent == [RecentId(2**64 - 1, 3, 41, 1), RecentId(7, 3, 42, 0)]
    assert found[user_id].positions == {3: 42}
    assert found["other"].events == []


def test_a_write_on_an_old_reading_is_refused_and_others_go_through(store: Store, epoch: str) -> None:
    store.apply([update("ann")], epoch, {})
    with pytest.raises(Conflict, match="1 of 2"):
        store.apply([update("ann", positions={3: 99}), update("bob")], epoch, {})
    found = store.load_users(["ann", "bob"], epoch)
    assert found["ann"].positions == {3: 42}
    assert found["bob"].positions == {3: 42}


def test_a_write_on_the_latest_reading_replaces(store: Store, epoch: str) -> None:
    store.apply([update("ann")], epoch, {})
    expected = store.load_users(["ann"], epoch)["ann"].expected
    store.apply([update("ann", expected, positions={3: 43, 5: 1}, events=EVENTS[1:], recent=[])], epoch, {})
    found = store.load_users(["ann"], epoch)["ann"]
    assert (found.positions, found.events, found.recent) == ({3: 43, 5: 1}, EVENTS[1:], [])


def test_a_state_of_another_model_is_written_beside_while_its_history_stands(store: Store, epoch: str) -> None:
    store.apply([update("ann"), update("bob")], epoch, {})
    theirs = {"model_version": "model-2", "state": state(model="model-2"), "forgotten": {}}
    moved = ModelState(user_id="bob", positions={3: 41}, **theirs)
    assert store.store_states([ModelState(user_id="ann", positions={3: 42}, **theirs), moved], epoch) == 1
    assert store.store_states([], epoch) == 0
    if not isinstance(store, MemoryStore):
        assert store.are_whole(["ann", "bob", "eve"], "model-2", epoch) == {"ann": True, "bob": False}
        assert store.are_whole(["ann", "bob", "eve"], MODEL, epoch) == {"ann": True, "bob": True}
        # A duplicate moves the position alone, and the state with it.
        before = store.load_users(["ann"], epoch)["ann"].expected
        store.apply([update("ann", before, positions={3: 43}, state=None, state_change="keep")], epoch, {})
        assert store.are_whole(["ann"], "model-2", epoch) == {"ann": False}
        kept = {"model_version": "model-2", "forgotten": {}, "change": "keep", "before": before}
        assert store.store_states([ModelState(user_id="ann", positions={3: 43}, **kept)], epoch) == 1
        assert store.are_whole(["ann"], "model-2", epoch) == {"ann": True}
        none = ModelState(user_id="ann", model_version="model-3", positions={3: 43}, forgotten={})
        assert store.store_states([none], epoch) == 1
        assert store.are_whole(["ann"], "model-3", epoch) == {"ann": True}
        gone = {"model_version": "model-2", "forgotten": {}, "change": "drop"}
        assert store.store_states([ModelState(user_id="ann", positions={3: 43}, **gone)], epoch) == 1
        assert store.are_whole(["ann"], "model-2", epoch) == {"ann": False}


def test_what_an_earlier_epoch_left_reads_as_absent_and_can_be_replaced(store: Store) -> None:
    store.apply([update("ann")], EARLIER, {})
    found = store.load_users(["ann"], NOW)["ann"]
    assert (found.events, found.positions) == ([], {})
    store.apply([update("ann", found.expected, positions={0: 0})], NOW, {})
    assert store.load_users(["ann"], NOW)["ann"].positions == {0: 0}


def test_progress_moves_once_and_adds_up(store: Store, epoch: str) -> None:
    assert store.begin([0, 1], epoch)[1].watermark == -1
    first = AdvanceStep(partition=1, from_watermark=-1, to_watermark=9, counts={"applied": 8, "duplicates": 2})
    store.advance([first], epoch)
    with pytest.raises(Conflict, match=r"\[1\]"):
        store.advance([first], epoch)
    store.advance([AdvanceStep(partition=1, from_watermark=9, to_watermark=11, counts={"applied": 2})], epoch)
    found = store.progress([1], epoch)[1]
    assert found.watermark == 11
    assert {name: count for name, count in found.counts.items() if count} == {"applied": 10, "duplicates": 2}


def test_progress_of_an_earlier_epoch_counts_for_nothing(store: Store) -> None:
    earlier, _ = store.ensure_epoch(NUM_PARTITIONS)
    store.begin([0], earlier)
    store.advance([AdvanceStep(partition=0, from_watermark=-1, to_watermark=9, counts={"applied": 10})], earlier)
    lose_epoch(store)
    now, _ = store.ensure_epoch(NUM_PARTITIONS)
    assert store.progress([0], now)[0].watermark == store.begin([0], now)[0].watermark == -1
    store.advance([AdvanceStep(partition=0, from_watermark=-1, to_watermark=0, counts={"applied": 1})], now)
    found = store.begin([0], now)[0]
    assert (found.watermark, found.counts["applied"]) == (0, 1)


def test_a_process_that_missed_a_new_epoch_puts_nothing_in_the_place_of_its_progress(store: Store) -> None:
    earlier, _ = store.ensure_epoch(NUM_PARTITIONS)
    store.begin([0], earlier)
    lose_epoch(store)
    now, _ = store.ensure_epoch(NUM_PARTITIONS)
    store.begin([0], now)
    step = AdvanceStep(partition=0, from_watermark=-1, to_watermark=9, counts={})
    for late in (
        lambda: store.begin([0], earlier),
        lambda: store.seed(0, ["ann"], earlier),
        lambda: store.advance([step], earlier),
    ):
        with pytest.raises(Conflict):
            late()
    store.advance([step], now)
    assert list(store.user_ids(0, earlier)) == []


def test_a_writer_that_missed_a_step_writes_nothing(store: Store, epoch: str) -> None:
    """It took another store for this one: a replica that lagged took over, or another process moved the watermark."""
    home = ANN_HOME.partition
    store.begin([home], epoch)
    store.apply([update("ann")], epoch, {home: -1})
    store.advance([AdvanceStep(partition=home, from_watermark=-1, to_watermark=4, counts={}, unfinished=1)], epoch)
    expected = store.load_users(["ann"], epoch)["ann"].expected
    for known in (-1, 3, 5):
        with pytest.raises(Conflict, match="1 of 1"):
            store.apply([update("ann", expected, positions={home: 9})], epoch, {home: known})
    store.apply([update("ann", expected, positions={home: 9})], epoch, {home: 4})
    assert store.load_users(["ann"], epoch)["ann"].positions == {home: 9}


def test_a_watermark_moves_only_over_all_users_that_were_written(store: Store, epoch: str) -> None:
    home = ANN_HOME.partition
    store.begin([home], epoch)
    store.apply([update("ann")], epoch, {home: -1})
    assert store.progress([home], epoch)[home].unfinished == 1
    step = AdvanceStep(partition=home, from_watermark=-1, to_watermark=4, counts={"applied": 1})
    for known in (0, 2):
        with pytest.raises(Conflict):
            store.advance([replace(step, unfinished=known)], epoch)
    store.advance([replace(step, unfinished=1)], epoch)
    found = store.progress([home], epoch)[home]
    assert (found.watermark, found.unfinished) == (4, 0)


def test_a_store_with_other_partitions_is_refused(store: Store) -> None:
    store.ensure_epoch(NUM_PARTITIONS)
    with pytest.raises(PreconditionFailed, match=r"8 partitions .* has 16 now"):
        store.ensure_epoch(16)


def test_a_dump_is_all_of_a_user_but_states_and_progress_as_of_then(store: Store, epoch: str) -> None:
    recent = [RecentId(2**64 - 1, 3, 41, 1), RecentId(7, 3, 42, 0, "日本")]
    seen = {"item-1": 1_001, "item-2": 1_800_000_000_000, "日本": 0}
    store.apply(
        [update("ann", recent=recent, seen_times=seen, forgotten={5: 9}), update("bob", seen_times={"x": 2})], epoch, {}
    )
    store.begin([1], epoch)
    store.advance([AdvanceStep(partition=1, from_watermark=-1, to_watermark=9, counts={"applied": 8})], epoch)
    found = store.dump(["ann", "bob", "nobody"], [0, 1], epoch)
    assert (set(found.histories), list(found.lost)) == ({"ann", "bob"}, [])
    ann = found.histories["ann"]
    assert (ann.positions, ann.forgotten) == ({3: 42}, {5: 9})
    assert stored_history.unpack_events(b"\x02" + ann.events) == EVENTS
    assert stored_history.unpack_recent(ann.recent) == recent
    assert stored_history.seen_of(ann.seen_item_ids, ann.seen_times_ms) == seen
    assert (found.progress[0].watermark, found.progress[1].watermark, found.progress[1].counts["applied"]) == (-1, 9, 8)
    assert store.dump([], [1], epoch).progress == {1: found.progress[1]}


def lost(store: Store, epoch: str) -> list[str]:
    return sorted({user_id for found in store.find_lost(range(NUM_PARTITIONS), epoch) for user_id in found})


def test_seeded_users_are_lost_until_they_are_written_and_known_ones_stay(store: Store, epoch: str) -> None:
    home = ANN_HOME.partition
    others = [name for name in map(str, range(50)) if state_layout.home_of(name, epoch).partition == home][:2]
    store.apply([update("ann", positions={home: 7})], epoch, {})
    store.begin([home], epoch)
    store.seed(home, ["ann", *others], epoch)
    assert sorted(store.user_ids(home, epoch)) == sorted(["ann", *others])
    assert list(store.user_ids(home, LATER)) == []
    assert lost(store, epoch) == sorted(others)
    found = store.load_users(["ann", *others], epoch)
    assert {name: (one.is_lost, one.known) for name, one in found.items()} == {
        "ann": (False, 7),
        **dict.fromkeys(others, (True, -1)),
    }
    assert sorted(store.dump(["ann", *others], [], epoch).lost) == sorted(others)
    store.rewrite([update(others[0], positions={home: 9})], epoch)
    assert lost(store, epoch) == others[1:]


@pytest.mark.integration
@pytest.mark.parametrize("gone", ["history", "seen"])
async def test_a_user_whose_keys_are_gone_is_lost_and_not_new(
    gone: str, reader: StateReader, writer: StateWriter, redis_url: str
) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    home = ANN_HOME.partition
    writer.apply([update("ann", positions={home: 7}), update("bob")], epoch, {})
    assert lost(writer, epoch) == []
    assert not (await reader.read_user("ann", MODEL)).is_lost
    with open_client(redis_url, timeout_s=5) as client:
        client.delete(state_layout.history_key(ANN_HOME) if gone == "history" else state_layout.seen_key(ANN_HOME))
    assert lost(writer, epoch) == ["ann"]
    view = await reader.read_user("ann", MODEL)
    assert (view.has_history, view.reaches_history) == (gone == "seen", gone == "seen")
    found = writer.load_users(["ann", "bob", "new"], epoch)
    assert {user_id: history.is_lost for user_id, history in found.items()} == {"ann": True, "bob": False, "new": False}
    assert (await reader.read_user("ann", MODEL)).is_lost
    assert not (await reader.read_user("new", MODEL)).is_lost
    writer.rewrite([update("ann", found["ann"].expected, positions={home: 7})], epoch)
    assert lost(writer, epoch) == []
    assert not (await reader.read_user("ann", MODEL)).is_lost


class HeldUp:
    """A client whose first pipeline waits until it may go on."""

    def __init__(self, client: Any) -> None:
        self._client, self._is_first = client, True
        self.waits, self.goes_on = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pipeline(self, **options: Any) -> Any:
        pipeline = self._client.pipeline(**options)
        execute, is_first = pipeline.execute, self._is_first
        self._is_first = False

        async def held() -> Any:
            if is_first:
                self.waits.set()
                await self.goes_on.wait()
            return await execute()

        pipeline.execute = held
        return pipeline


def applied(writer: StateWriter, epoch: str, offset: int) -> None:
    """Something of ann's home partition is applied for the first time in this epoch."""
    home = ANN_HOME.partition
    writer.begin([home], epoch)
    writer.advance([AdvanceStep(partition=home, from_watermark=-1, to_watermark=offset, counts={})], epoch)


@pytest.mark.integration
async def test_an_answer_of_a_former_epoch_is_asked_again_whatever_another_call_learnt_meanwhile(
    reader: StateReader, writer: StateWriter, redis_url: str
) -> None:
    former, _ = writer.ensure_epoch(NUM_PARTITIONS)
    writer.apply([update("ann", positions={ANN_HOME.partition: 7})], former, {})
    assert not (await reader.read_user("ann", MODEL)).is_lost
    reader._redis = client = HeldUp(reader._redis)  # type: ignore[assignment]
    asked = asyncio.create_task(reader.read_user("ann", MODEL))
    await client.waits.wait()
    with open_client(redis_url, timeout_s=5) as store:
        store.flushall()
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    applied(writer, epoch, 7)
    writer.seed(ANN_HOME.partition, ["ann"], epoch)
    other = await reader.read_user("ann", MODEL)
    client.goes_on.set()
    assert await asked == other
    assert (other.epoch, other.is_lost, other.watermark) == (epoch, True, 7)


@pytest.mark.integration
async def test_after_a_store_was_emptied_everybody_is_lost_until_it_says_who_was_there(
    reader: StateReader, writer: StateWriter, redis_url: str
) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    home = ANN_HOME.partition
    elsewhere = next(name for name in map(str, range(100)) if state_layout.home_of(name, epoch).partition != home)
    new = next(name for name in map(str, range(100)) if state_layout.home_of(name, epoch).partition == home)

    async def who_is_lost() -> dict[str, bool]:
        return {name: (await reader.read_user(name, MODEL)).is_lost for name in ("ann", new, elsewhere)}

    nobody = {"ann": False, new: False, elsewhere: False}
    assert await who_is_lost() == nobody
    writer.apply([update("ann", positions={home: 7})], epoch, {})
    applied(writer, epoch, 7)
    assert await who_is_lost() == nobody
    with open_client(redis_url, timeout_s=5) as store:
        store.flushall()
    everybody_at_home = nobody | {"ann": True, new: True}
    assert await who_is_lost() == everybody_at_home
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    assert await who_is_lost() == everybody_at_home
    writer.begin([home], epoch)
    writer.seed(home, ["ann"], epoch)
    assert await who_is_lost() == everybody_at_home
    applied(writer, epoch, 7)
    assert await who_is_lost() == nobody | {"ann": True}


@pytest.mark.integration
def test_usage_says_how_full_the_store_is(writer: StateWriter, redis_url: str) -> None:
    with open_client(redis_url, timeout_s=5) as client:
        before = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", 2 * client.info("memory")["used_memory"])
        assert 0.3 < writer.usage().memory_share < 0.9
        client.config_set("maxmemory", 0)
        assert writer.usage().memory_share == 0.0
        client.config_set("maxmemory", before)


@pytest.mark.integration
async def test_a_user_whose_time_is_over_is_not_lost(reader: StateReader, redis_url: str) -> None:
    writer = StateWriter(redis_url, ttl_seconds=1)
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    removed = writer.usage().removed
    writer.apply([update("ann")], epoch, {})
    eventually(lambda: writer.usage().removed > removed)
    eventually(lambda: not writer.load_users(["ann"], epoch)["ann"].is_lost)
    assert lost(writer, epoch) == []
    with open_client(redis_url, timeout_s=5) as client:
        assert client.hexists(state_layout.users_key(ANN_HOME.partition), "ann") is False
    writer.close()


@pytest.mark.integration
async def test_a_reader_follows_to_another_epoch_with_other_partitions(
    reader: StateReader, writer: StateWriter, redis_url: str
) -> None:
    for number in (NUM_PARTITIONS, 3):
        with open_client(redis_url, timeout_s=5) as client:
            client.flushall()
        epoch, _ = writer.ensure_epoch(number)
        writer.apply([update(f"user-{n}") for n in range(8)], epoch, {})
        assert [(await reader.read_user(f"user-{n}", MODEL)).state for n in range(8)] == [state()] * 8


def test_recent_ids_keep_the_items_that_can_still_be_undone(store: Store, epoch: str) -> None:
    recent = [RecentId(1, 3, 40, 0, "item-0"), RecentId(2, 3, 41, 1), RecentId(3, 3, 42, 0, "日本")]
    store.apply([update("ann", recent=recent)], epoch, {})
    assert store.load_users(["ann"], epoch)["ann"].recent == recent


def forgotten(store: Store, user_id: str, epoch: str, **changes: Any) -> UserUpdate:
    expected = store.load_users([user_id], epoch)[user_id].expected
    fields: dict[str, Any] = {
        "events": [],
        "recent": [RecentId(7, 3, 42, 0)],
        "seen_times": {},
        "forgotten": {3: 42, 5: 9},
        "state": None,
        "state_change": "keep",
    }
    return update(user_id, expected, **(fields | changes))


@pytest.mark.parametrize("user_id", ["ann", "a}b{c"])
def test_a_forgotten_user_leaves_positions_and_nothing_else(store: Store, user_id: str, epoch: str) -> None:
    store.add_model(MODEL)
    store.add_model("model-2")
    store.apply([update(user_id), update("bob")], epoch, {})
    second = state(model="model-2")
    expected = store.load_users([user_id], epoch)[user_id].expected
    store.apply([replace(update(user_id, expected, state=second), model_version="model-2")], epoch, {})
    store.rewrite([forgotten(store, user_id, epoch)], epoch)
    found = store.load_users([user_id, "bob"], epoch)
    assert (found[user_id].events, found[user_id].recent) == ([], [RecentId(7, 3, 42, 0)])
    assert (found[user_id].positions, found[user_id].forgotten) == ({3: 42}, {3: 42, 5: 9})
    assert found["bob"].events == EVENTS


def test_a_write_prepared_before_a_forget_is_refused_after_it(store: Store, epoch: str) -> None:
    store.apply([update("ann")], epoch, {})
    expected = store.load_users(["ann"], epoch)["ann"].expected
    store.rewrite([forgotten(store, "ann", epoch)], epoch)
    with pytest.raises(Conflict, match="1 of 1"):
        store.apply([update("ann", expected, positions={3: 43})], epoch, {})
    assert store.load_users(["ann"], epoch)["ann"].events == []


def test_a_forget_prepared_before_a_write_is_refused_after_it(store: Store, epoch: str) -> None:
    store.apply([update("ann"), update("bob")], epoch, {})
    late = [forgotten(store, user_id, epoch) for user_id in ("ann", "bob")]
    expected = store.load_users(["ann"], epoch)["ann"].expected
    store.apply([update("ann", expected, positions={3: 43})], epoch, {})
    with pytest.raises(Conflict, match="1 of 2"):
        store.rewrite(late, epoch)
    found = store.load_users(["ann", "bob"], epoch)
    assert (found["ann"].events, found["bob"].events) == (EVENTS, [])


def test_what_comes_after_a_forget_is_kept_beside_it(store: Store, epoch: str) -> None:
    store.apply([update("ann")], epoch, {})
    later = StoredEvent(9_000, 3, 43, 5, "item-9")
    rest = forgotten(store, "ann", epoch, events=[later], positions={3: 43})
    store.rewrite([replace(rest, seen_times={"item-9": 9_000})], epoch)
    found = store.load_users(["ann"], epoch)["ann"]
    assert (found.events, found.positions) == ([later], {3: 43})
    store.apply([update("ann", found.expected, positions={3: 44}, forgotten=found.forgotten)], epoch, {})
    assert store.load_users(["ann"], epoch)["ann"].forgotten == {3: 42, 5: 9}


def test_what_an_earlier_epoch_left_of_a_user_is_erased(store: Store) -> None:
    store.apply([update("ann")], EARLIER, {})
    store.rewrite([forgotten(store, "ann", NOW, positions={})], NOW)
    assert store.load_users(["ann"], EARLIER)["ann"].events == []
    found = store.load_users(["ann"], NOW)["ann"]
    assert (found.events, found.positions, found.forgotten) == ([], {}, {3: 42, 5: 9})


def test_how_far_forgets_are_applied_is_each_readers_own_and_of_its_epoch(store: Store, epoch: str) -> None:
    mine, stale = (store.forgets_applied("a", epoch) for _ in range(2))
    assert mine.offset == -1
    store.note_forgets(mine, 7, epoch)
    assert mine == store.forgets_applied("a", epoch)
    assert (mine.offset, store.forgets_applied("b", epoch).offset) == (7, -1)
    assert store.forgets_applied("a", LATER).offset == -1
    with pytest.raises(Conflict):
        store.note_forgets(stale, 8, epoch)


def test_how_far_forgets_are_applied_is_noted_by_partition(store: Store, epoch: str) -> None:
    mine, others = store.forgets_applied("a", epoch).of([1, 3]), store.forgets_applied("a", epoch).of([2])
    store.note_forgets(mine, 7, epoch)
    store.note_forgets(others, 5, epoch)
    found = store.forgets_applied("a", epoch)
    assert (found.of([1, 3]), found.of([2])) == (mine, others)
    assert {p: at for p, at in found.offsets.items() if at >= 0} == {1: 7, 2: 5, 3: 7}
    assert (mine.offset, found.of([1, 2]).offset, found.offset, found.of([]).offset) == (7, 5, -1, -1)


def test_a_hold_lasts_until_it_is_released(store: Store) -> None:
    assert not store.is_paused()
    store.pause_consumer(60)
    assert store.is_paused()
    store.release()
    assert not store.is_paused()


def test_a_hold_ends_by_itself_unless_asked_for_again(store: Store) -> None:
    store.pause_consumer(1)
    eventually(lambda: not store.is_paused())


@pytest.fixture
async def user_reader(store: Store, request: pytest.FixtureRequest) -> AsyncIterator[UserReader]:
    """What another loop reads of the store."""
    if isinstance(store, MemoryStore):
        yield store
        return
    reader = StateReader(request.getfixturevalue("redis_url"), timeout_s=2)
    yield reader
    await reader.close()


async def test_what_is_stored_of_a_user_is_told_until_it_is_forgotten(
    store: Store, user_reader: UserReader, epoch: str
) -> None:
    for model in (MODEL, "model-2"):
        store.add_model(model)
        expected = store.load_users(["ann"], epoch)["ann"].expected
        stored = update("ann", expected, state=state(model=model), seen_times={"item-1": 1, "item-2": 2})
        store.apply([replace(stored, model_version=model)], epoch, {})
    store.apply([update("bob", state=None, state_change="keep")], epoch, {})
    keys = UserKeys(history_events=3, seen_items=2, state_model_versions=(MODEL, "model-2"))
    assert await user_reader.read_keys("ann") == keys
    assert await user_reader.read_keys("bob") == UserKeys(history_events=3, seen_items=1, state_model_versions=())
    store.rewrite([forgotten(store, "ann", epoch)], epoch)
    nothing = UserKeys(history_events=0, seen_items=0, state_model_versions=())
    assert await user_reader.read_keys("ann") == nothing
    assert await user_reader.read_keys("nobody") == nothing


def advanced(number: int, popular: PopularityStep | None) -> AdvanceStep:
    return AdvanceStep(partition=1, from_watermark=number - 1, to_watermark=number, counts={}, popular=popular)


async def test_popularity_is_the_faded_sum_of_what_joined_and_did_not_go(
    store: Store, user_reader: UserReader, epoch: str
) -> None:
    store.begin([0, 1], epoch)
    rng, hour, now = random.Random(1), 3600.0, 1_800_000_000_000
    sums: dict[str, float] = {}
    taken: list[tuple[str, float, int]] = []
    for number in range(200):
        joins, goes = {}, {}
        for item_id in rng.sample(["a", "b", "日本", "a b"], 2):
            weight, time_ms = rng.choice([0.5, 1.0, 3.0]), now + rng.randrange(-20, 1) * 1_800_000
            joins[item_id] = popularity.level_of(weight, time_ms, hour)
            sums[item_id] = sums.get(item_id, 0.0) + weight * 2 ** ((time_ms - now) / 3_600_000)
            taken.append((item_id, weight, time_ms))
        if number % 3 == 0:
            item_id, weight, time_ms = taken.pop(rng.randrange(len(taken)))
            goes[item_id] = popularity.level_of(weight, time_ms, hour)
            sums[item_id] -= weight * 2 ** ((time_ms - now) / 3_600_000)
        step = advanced(number, PopularityStep(half_life_s=hour, joins=joins, goes=goes))
        store.advance([step], epoch)
        with pytest.raises(Conflict):  # once
            store.advance([step], epoch)
    (found,) = await user_reader.read_popular()
    counts = {item_id: popularity.count_at(level, now, hour) for item_id, level in found.levels.items()}
    assert found.half_life_s == hour
    assert counts == pytest.approx(sums, rel=1e-6)
    assert list(counts) == sorted(counts, key=lambda item_id: -counts[item_id])


async def test_what_all_goes_is_gone_and_what_was_never_there_goes_without_a_trace(
    store: Store, user_reader: UserReader, epoch: str
) -> None:
    store.begin([1], epoch)
    assert list(await user_reader.read_popular()) == []
    one = {"a": 500.0, "b": 510.25}
    store.advance([advanced(0, PopularityStep(half_life_s=60.0, joins=one))], epoch)
    store.advance([advanced(1, PopularityStep(half_life_s=60.0, goes={"a": 500.0, "x": 499.0, "b": 900.0}))], epoch)
    store.advance([advanced(2, PopularityStep(half_life_s=60.0))], epoch)
    assert list(await user_reader.read_popular()) == []


async def test_so_many_of_a_partition_stay_popular(
    store: Store, user_reader: UserReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_layout, "MAX_POPULAR", 3)
    epoch, _ = store.ensure_epoch(NUM_PARTITIONS)
    store.begin([1], epoch)
    levels = {f"item-{number}": float(number) for number in range(5)}
    store.advance([advanced(0, PopularityStep(half_life_s=60.0, joins=levels))], epoch)
    (found,) = await user_reader.read_popular()
    assert found.levels == {"item-4": 4.0, "item-3": 3.0, "item-2": 2.0}


@pytest.fixture
async def reader(redis_url: str) -> Any:
    with open_client(redis_url, timeout_s=5) as client:
        client.flushall()
    reader = StateReader(redis_url, timeout_s=2)
    yield reader
    await reader.close()


@pytest.fixture
def writer(redis_url: str, reader: StateReader) -> Iterator[StateWriter]:
    writer = StateWriter(redis_url, max_seen=5, ttl_seconds=1_000)
    yield writer
    writer.close()


@pytest.mark.integration
async def test_a_reader_sees_what_became_of_each_partitions_records(reader: StateReader, writer: StateWriter) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    writer.begin([3], epoch)
    writer.advance([AdvanceStep(partition=3, from_watermark=-1, to_watermark=42, counts={"applied": 43})], epoch)
    found, progress = await reader.read_progress()
    assert (found, progress[3].watermark, progress[3].counts["applied"], progress[0].watermark) == (epoch, 42, 43, -1)


@pytest.mark.integration
def test_a_forget_takes_every_key_but_the_history_with_its_positions(writer: StateWriter, redis_url: str) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    for model in (MODEL, "model-2"):
        writer.add_model(model)
        expected = writer.load_users(["ann"], epoch)["ann"].expected
        stored = state(model=model)
        writer.apply([replace(update("ann", expected, state=stored), model_version=model)], epoch, {})
    writer.rewrite([forgotten(writer, "ann", epoch)], epoch)
    with open_client(redis_url, timeout_s=5) as client:
        assert [key.decode() for key in client.scan_iter("{p*}:[hs]*:*")] == [ANN_HISTORY]
        assert b"item" not in b"".join(client.hvals(ANN_HISTORY))  # type: ignore[arg-type]
        assert 0 < client.ttl(ANN_HISTORY) <= 1_000


@pytest.mark.integration
def test_a_forget_is_not_noted_on_a_store_that_went_back(writer: StateWriter, redis_url: str) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    home = home_of("ann", epoch).partition
    writer.apply([update("ann"), update("bob")], epoch, {})
    with open_client(redis_url, timeout_s=5) as client:
        mine = writer.forgets_applied("a", epoch)
        writer.rewrite([forgotten(writer, "ann", epoch)], epoch, mine)
        # A node takes over that has not got this user yet.
        client.delete(forgets_key(home))
        with pytest.raises(Conflict, match="lost progress"):
            writer.note_forgets(mine, 7, epoch)
        mine = writer.forgets_applied("a", epoch)
        writer.note_forgets(mine, 7, epoch)
        # Another one, which lacks the forget before.
        client.hset(forgets_key(home), "a", f"{epoch}|6")
        before = writer.load_users(["ann"], epoch)
        with pytest.raises(Conflict, match="1 of 1"):
            writer.rewrite([forgotten(writer, "ann", epoch)], epoch, mine)
        assert writer.load_users(["ann"], epoch) == before
        assert writer.forgets_applied("a", epoch).offset == 6


@pytest.mark.integration
async def test_every_user_key_expires(writer: StateWriter, redis_url: str) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    writer.apply([update("ann}{")], epoch, {})
    home = state_layout.home_of("ann}{", epoch).partition
    with open_client(redis_url, timeout_s=5) as client:
        keys = sorted(client.scan_iter("{p*}:[hs]*:*"))
        kinds = ("history", "seen", f"state:{MODEL}")
        assert [key.decode() for key in keys] == [f"{{p{home}}}:{kind}:ann}}{{" for kind in kinds]
        assert all(0 < client.ttl(key) <= 1_000 for key in keys)


@pytest.mark.integration
async def test_a_redis_that_forgot_the_scripts_gets_them_again(writer: StateWriter, redis_url: str) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    writer.apply([update("ann")], epoch, {})
    with open_client(redis_url, timeout_s=5) as client:
        client.script_flush()
    writer.apply([update("bob")], epoch, {})
    assert writer.load_users(["bob"], epoch)["bob"].positions == {3: 42}


@pytest.mark.integration
async def test_a_store_of_another_version_is_refused_until_it_is_this_ones(
    reader: StateReader, writer: StateWriter, redis_url: str
) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    writer.apply([update("ann")], epoch, {})
    served = await reader.read_user("ann", MODEL)
    with open_client(redis_url, timeout_s=5) as client:
        client.set(state_layout.EPOCH_KEY, "0123456789abcdef")
        for read in (reader.read_user("ann", MODEL), reader.read_progress(), reader.read_events("ann")):
            with pytest.raises(PreconditionFailed, match="stream:epoch='0123456789abcdef' in the state store; allowed"):
                await read
        with pytest.raises(PreconditionFailed, match="stream:epoch='0123456789abcdef' in the state store; allowed"):
            writer.ensure_epoch(NUM_PARTITIONS)
        client.set(state_layout.EPOCH_KEY, epoch)
    assert await reader.read_user("ann", MODEL) == served


async def test_an_absent_redis_is_an_unavailable_dependency() -> None:
    url = f"redis://127.0.0.1:{Ports.free()['redis']}/0"
    writer, reader = StateWriter(url, timeout_s=0.5), StateReader(url, timeout_s=0.5)
    with pytest.raises(DependencyUnavailable, match="Redis"):
        writer.ensure_epoch(NUM_PARTITIONS)
    with pytest.raises(DependencyUnavailable, match="Redis"):
        await reader.read_user("ann", MODEL)
    writer.close()
    await reader.close()


def test_a_history_of_another_format_is_refused() -> None:
    with pytest.raises(PreconditionFailed, match="format 9"):
        stored_history.unpack_events(b"\x09" + stored_history.pack_events(EVENTS)[1:])


TRACEPARENT = f"00-{5:032x}-{6:016x}-01"


@pytest.mark.integration
async def test_a_state_says_which_span_made_it_to_who_asks_and_later_ones_do_not(
    redis_url: str, reader: StateReader, writer: StateWriter
) -> None:
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    asking = StateReader(redis_url, timeout_s=2, with_traces=True)

    async def told() -> tuple[str, ...]:
        views = [await one.read_user("ann", MODEL) for one in (asking, reader)]
        assert all(view.reaches_history for view in views)
        return tuple(view.state.traceparent for view in views if view.state is not None)

    writer.apply([update(state=replace(state(), traceparent=TRACEPARENT))], epoch, {})
    assert await told() == (TRACEPARENT, "")
    # An event without a trace: what the field still says is of another state.
    expected = writer.load_users(["ann"], epoch)["ann"].expected
    writer.apply([update(expected=expected, positions={3: 43}, state=state(43))], epoch, {})
    assert await told() == ("", "")
    # The same where everything stored of a user is written again.
    expected = writer.load_users(["ann"], epoch)["ann"].expected
    traced = replace(state(44), traceparent=TRACEPARENT)
    writer.rewrite([update(expected=expected, positions={3: 44}, state=traced)], epoch)
    assert await told() == (TRACEPARENT, "")
    await asking.close()


def other_state(store: Store, model: str = "model-2", user_id: str = "ann") -> tuple[bytes | None, bool]:
    """A user's state of another model: its components, and whether it reflects the history."""
    if isinstance(store, MemoryStore):
        found = store.states.get((user_id, model))
        current = store.load_users([user_id], store.epoch() or "")[user_id].expected
        is_whole = found is not None and store.state_positions[user_id, model] == current
        return None if found is None else found.query_state.components, is_whole
    client: redis.Redis = store._redis  # type: ignore[attr-defined]
    key = state_layout.state_key(state_layout.home_of(user_id, store.epoch() or ""), model)
    components, position = client.hmget(key, ["components", state_layout.STATE_POSITION])
    history = state_layout.history_key(state_layout.home_of(user_id, store.epoch() or ""))
    return components, position is not None and position == client.hget(history, "position")


def of_model(filling: bytes, model: str = "model-2") -> StoredState:
    made = state(model=model)
    return replace(made, query_state=replace(made.query_state, components=filling * 8))


def beside(update: UserUpdate, *states: tuple[str, StoredState | None]) -> list[ModelState]:
    """What becomes of other models' states with an update."""
    return [
        ModelState(
            user_id=update.user_id,
            model_version=model,
            positions=update.positions,
            forgotten=update.forgotten,
            state=state,
            change="keep" if update.state_change == "keep" else "drop" if state is None else "set",
            before=update.expected,
        )
        for model, state in states
    ]


def next_update(store: Store, offset: int, **changes: Any) -> UserUpdate:
    expected = store.load_users(["ann"], store.epoch() or "")["ann"].expected
    return update("ann", expected, positions={3: offset}, **changes)


def test_other_models_states_are_written_with_the_history(store: Store, epoch: str) -> None:

    def apply(offset: int, *states: tuple[str, StoredState | None], **changes: Any) -> None:
        made = next_update(store, offset, **changes)
        store.apply([made], epoch, {}, beside(made, *states))

    keep: dict[str, Any] = {"state": None, "state_change": "keep"}
    apply(42, ("model-2", of_model(b"a")), ("model-3", None))
    assert other_state(store) == (b"a" * 8, True)
    assert other_state(store, "model-3") == (None, False)
    # A model that is left out is left behind, and nothing but its next state makes up for that.
    apply(43)
    assert other_state(store) == (b"a" * 8, False)
    apply(44, ("model-2", None), **keep)
    assert other_state(store) == (b"a" * 8, False)
    apply(45, ("model-2", of_model(b"b")))
    apply(46, ("model-2", None), **keep)
    assert other_state(store) == (b"b" * 8, True)
    apply(47, ("model-2", of_model(b"c")), state=None, state_change="drop")
    assert (other_state(store), other_state(store, MODEL)) == ((b"c" * 8, True), (None, False))
    apply(48, ("model-2", None))
    assert other_state(store) == (None, False)


def test_a_refused_write_leaves_other_models_states_alone(store: Store, epoch: str) -> None:
    first = next_update(store, 42)
    store.apply([first], epoch, {}, beside(first, ("model-2", of_model(b"a"))))
    refused, bob = update("ann", b"", positions={3: 99}), update("bob")
    states = [state for one in (refused, bob) for state in beside(one, ("model-2", of_model(b"b")))]
    with pytest.raises(Conflict, match="1 of 2"):
        store.apply([refused, bob], epoch, {}, states)
    assert other_state(store) == (b"a" * 8, True)
    assert other_state(store, user_id="bob") == (b"b" * 8, True)


def test_a_state_made_beside_cannot_come_back_after_a_forget(store: Store, epoch: str) -> None:
    store.add_model("model-2")
    made = next_update(store, 42)
    store.apply([made], epoch, {})
    states = [replace(one, before=b"") for one in beside(made, ("model-2", of_model(b"a")))]
    assert store.store_states(states, epoch) == 1
    assert other_state(store) == (b"a" * 8, True)
    store.rewrite([next_update(store, 42, events=[], state=None, state_change="keep", forgotten={3: 42})], epoch)
    assert store.store_states(states, epoch) == 0
    assert other_state(store) == (None, False)
    nothing = [replace(states[0], user_id="nobody", positions={})]
    assert store.store_states(nothing, epoch) == 0
