"""One suite for the gateway's reading of user states: on the encoder's store in memory always, on Redis with the
integration tests. What is read was written through the encoder's port, whose own suite is test_state_store.py.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fakes.gateway import StoredUserStates
from suites import either

from services.contracts.stored_history import RecentId, StoredEvent
from services.contracts.wire import PackedQueryState
from services.gateway.ports import UserStates
from services.offline.backfill.memory_store import MemoryStore
from services.platform.redis_clients import open_client
from services.platform.stream.kafka import partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state.layout import EPOCH_KEY
from services.user_state.ports import Store
from services.user_state.reader import StateReader
from services.user_state.values import AdvanceStep, ModelState, StoredState, UserUpdate, UserView
from services.user_state.writer import StateWriter

MODEL = "model-1"
NOTHING_APPLIED = dict.fromkeys(range(NUM_PARTITIONS), -1)


@dataclass
class Scene:
    """The gateway reads `states`, which the encoder process writes as `store`."""

    states: UserStates
    store: Store

    async def view(self, user_id: str = "ann", *, with_seen: bool = True) -> UserView:
        return await self.states.read_user(user_id, MODEL, with_seen=with_seen, partition=3)

    async def watermarks(self) -> tuple[str | None, dict[int, int]]:
        epoch, found = await self.states.read_progress()
        return epoch, {partition: one.watermark for partition, one in found.items()}

    def lose_epoch(self) -> None:
        if isinstance(self.store, MemoryStore):
            self.store._epoch = None
        else:
            self.store._redis.delete(EPOCH_KEY)  # type: ignore[attr-defined]

    def apply(self, epoch: str, *, user_id: str = "ann", model: str = MODEL, **changes: Any) -> StoredState:
        """Write a user's next history; its state."""
        state = StoredState(
            query_state=PackedQueryState(
                model_version=model, components=b"\x00\x3c" * 4, gate=b"\x00\x40", num_components=1, component_width=4
            ),
            partition=3, offset=42, event_time_ms=1_002, applied_ms=9_000,
        )  # fmt: skip
        fields: dict[str, Any] = {
            "positions": {3: 42},
            "events": [StoredEvent(1_000 + n, 3, 40 + n, n, f"item-{n}") for n in range(3)],
            "recent": [RecentId(7, 3, 42, 0)],
            "seen_times": {"item-1": 1_001},
            "state": state,
            "state_change": "set",
        }
        expected = self.store.load_users([user_id], epoch)[user_id].expected
        update = UserUpdate(user_id=user_id, model_version=model, expected=expected, **(fields | changes))
        self.store.apply([update], epoch, {})
        return state


def told(view: UserView) -> tuple[StoredState | None, list[str], str | None, int | None]:
    return view.state, view.seen, view.epoch, view.watermark


@pytest.fixture(params=either("redis"))
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    if request.param == "memory":
        store = MemoryStore(max_seen=5)
        yield Scene(StoredUserStates(store=store, model_version=MODEL), store)
        return
    url = request.getfixturevalue("redis_url")
    with open_client(url, timeout_s=5) as client:
        client.flushall()
    reader, writer = StateReader(url, timeout_s=2), StateWriter(url, max_seen=5)
    yield Scene(reader, writer)
    writer.close()
    await reader.close()


async def test_of_an_empty_store_nothing_is_known(scene: Scene) -> None:
    assert told(await scene.view()) == (None, [], None, None)
    assert list(await scene.states.read_events("ann")) == []
    assert await scene.states.epoch() is None
    assert await scene.watermarks() == (None, {})


async def test_one_reading_brings_state_seen_items_epoch_and_watermark(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    state = scene.apply(epoch, seen_times={f"item-{n}": n for n in range(7)})
    assert (await scene.view()).watermark == -1
    step = AdvanceStep(partition=3, from_watermark=-1, to_watermark=42, counts={"applied": 43})
    scene.store.begin([3], epoch)
    scene.store.advance([step], epoch)
    # Bounded: the two oldest are gone; the newest come first.
    seen = ["item-6", "item-5", "item-4", "item-3", "item-2"]
    assert told(await scene.view()) == (state, seen, epoch, 42)
    assert told(await scene.view(with_seen=False)) == (state, [], epoch, 42)
    assert told(await scene.view("bob")) == (None, [], epoch, 42)
    assert await scene.states.epoch() == epoch
    assert await scene.watermarks() == (epoch, NOTHING_APPLIED | {3: 42})


async def test_a_history_is_read_oldest_first(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    scene.apply(epoch)
    found = [(event.item_id, event.event_time_ms) for event in await scene.states.read_events("ann")]
    assert found == [(f"item-{n}", 1_000 + n) for n in range(3)]
    assert list(await scene.states.read_events("bob")) == []


async def test_a_state_of_another_model_version_is_no_state(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    scene.apply(epoch, model="model-2")
    view = await scene.view()
    assert (view.state, view.seen) == (None, ["item-1"])


async def test_seen_items_keep_their_newest_time_and_undone_ones_go(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    scene.apply(epoch, seen_times={"a": 5, "b": 4, "c": 3})
    scene.apply(epoch, positions={3: 43}, seen_times={"a": 1, "c": 9}, unseen={"b"})
    assert (await scene.view()).seen == ["c", "a"]


async def test_what_was_turned_down_is_what_the_last_writing_says(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    scene.apply(epoch)
    assert list((await scene.view()).turned_down) == []
    scene.apply(epoch, positions={3: 43}, turned_down=["item-1", "zwölf"])
    assert list((await scene.view()).turned_down) == ["item-1", "zwölf"]
    assert list((await scene.view(with_seen=False)).turned_down) == []
    scene.apply(epoch, positions={3: 44})
    assert list((await scene.view()).turned_down) == []


async def test_a_state_that_is_dropped_is_gone_and_one_that_is_kept_stays(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    state = scene.apply(epoch)
    scene.apply(epoch, positions={3: 43}, state=None, state_change="keep")
    assert (await scene.view()).state == state
    scene.apply(epoch, positions={3: 44}, state=None, state_change="drop")
    assert (await scene.view()).state is None


async def test_no_partition_means_the_users_home_as_the_epoch_counts_partitions(scene: Scene) -> None:
    home = partition_for(b"ann", 5)
    assert home != partition_for(b"ann", NUM_PARTITIONS)
    epoch, _ = scene.store.ensure_epoch(5)
    scene.store.begin([home], epoch)
    scene.store.advance([AdvanceStep(partition=home, from_watermark=-1, to_watermark=42, counts={})], epoch)
    found = await scene.states.read_user("ann", MODEL, with_seen=False)
    assert (found.partition, found.watermark) == (home, 42)
    assert (await scene.watermarks())[1].keys() == set(range(5))


async def test_what_an_earlier_epoch_left_is_read_until_it_is_replaced_but_its_progress_is_not(scene: Scene) -> None:
    earlier, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    state = scene.apply(earlier)
    step = AdvanceStep(partition=3, from_watermark=-1, to_watermark=42, counts={"applied": 43})
    scene.store.begin([3], earlier)
    scene.store.advance([step], earlier)
    scene.lose_epoch()
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    assert told(await scene.view()) == (state, ["item-1"], epoch, -1)
    assert len(await scene.states.read_events("ann")) == 3
    assert await scene.watermarks() == (epoch, NOTHING_APPLIED)


async def test_a_forgotten_user_is_unknown(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    scene.store.add_model(MODEL)
    scene.apply(epoch)
    expected = scene.store.load_users(["ann"], epoch)["ann"].expected
    update = UserUpdate(
        user_id="ann", model_version=MODEL, expected=expected, positions={3: 42}, events=[], recent=[], seen_times={},
        forgotten={3: 42},
    )  # fmt: skip
    scene.store.rewrite([update], epoch)
    view = await scene.view()
    assert (view.state, view.seen) == (None, [])
    assert list(await scene.states.read_events("ann")) == []
    scene.apply(epoch, positions={3: 43})
    assert (await scene.view()).reaches_history


async def test_a_state_that_another_models_process_left_behind_reaches_the_history_with_its_next_event(
    scene: Scene,
) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    state = scene.apply(epoch)
    assert (await scene.view()).reaches_history
    for offset, theirs in ((43, {}), (45, {"state": None, "state_change": "drop"})):
        scene.apply(epoch, model="model-2", positions={3: offset}, **theirs)
        view = await scene.view()
        assert (view.state, view.has_history, view.reaches_history) == (state, True, False)
        # A record that changes nothing leaves it as it was.
        scene.apply(epoch, positions={3: offset + 1}, state=None, state_change="keep")
        assert not (await scene.view()).reaches_history
        scene.apply(epoch, positions={3: offset + 1})
        assert (await scene.view()).reaches_history


async def test_a_state_of_this_model_that_another_models_process_wrote_reaches_the_history(scene: Scene) -> None:
    epoch, _ = scene.store.ensure_epoch(NUM_PARTITIONS)
    state = scene.apply(epoch)
    scene.apply(epoch, model="model-2", positions={3: 43})
    assert not (await scene.view()).reaches_history
    warmed = replace(state, offset=43)
    mine = ModelState(user_id="ann", model_version=MODEL, positions={3: 43}, forgotten={}, state=warmed)
    assert scene.store.store_states([replace(mine, positions={3: 42}), mine], epoch) == 1
    view = await scene.view()
    assert (view.state, view.reaches_history) == (warmed, True)
    before = scene.store.load_users(["ann"], epoch)["ann"].expected
    scene.apply(epoch, model="model-2", positions={3: 44}, state=None, state_change="keep")
    assert not (await scene.view()).reaches_history
    kept = replace(mine, positions={3: 44}, state=None, change="keep", before=before)
    assert scene.store.store_states([kept], epoch) == 1
    assert (await scene.view()).reaches_history
