"""Whether a stored state reflects the whole history, as the gateway's reader sees it in Redis, in one round trip."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import redis

from services.contracts.query_state import PackedQueryState
from services.contracts.stored_history import StoredEvent
from services.platform.stream.topic import NUM_PARTITIONS
from services.user_state import layout as state_layout
from services.user_state.reader import StateReader
from services.user_state.values import StoredState, UserUpdate, UserView
from services.user_state.writer import StateWriter

pytestmark = pytest.mark.integration


class Store:
    """Ann's state and history, written as by the encoder processes of several models."""

    def __init__(self, url: str) -> None:
        self.url, self.writer = url, StateWriter(url)
        self.epoch, _ = self.writer.ensure_epoch(NUM_PARTITIONS)

    def write(self, model: str, offset: int, change: str = "set", forgotten: Mapping[int, int] | None = None) -> None:
        """One more record of partition 3 is applied; `change` as in `UserUpdate.state_change`."""
        packed = PackedQueryState(
            model_version=model, components=b"\x00\x3c" * 8, gate=b"", num_components=2, component_width=4
        )
        state = StoredState(query_state=packed, partition=3, offset=offset, event_time_ms=1, applied_ms=2)
        fields: dict[str, Any] = {"state": state if change == "set" else None, "state_change": change}
        update = UserUpdate(
            user_id="ann",
            model_version=model,
            expected=self.writer.load_users(["ann"], self.epoch)["ann"].expected,
            positions={3: offset},
            events=[StoredEvent(offset, 3, offset, offset, "a")],
            recent=[],
            seen_times={"a": 1},
            forgotten=forgotten or {},
            **fields,
        )
        if forgotten is None:
            self.writer.apply([update], self.epoch, {})
        else:
            self.writer.rewrite([update], self.epoch)

    def view(self, model: str) -> UserView:
        async def read() -> UserView:
            reader = StateReader(self.url)
            try:
                return await reader.read_user("ann", model, partition=3)
            finally:
                await reader.close()

        return asyncio.run(read())

    def reaches(self, model: str) -> bool:
        found = self.view(model)
        return found.state is not None and found.reaches_history


@pytest.fixture
def store(own_redis: str) -> Iterator[Store]:
    found = Store(own_redis)
    yield found
    found.writer.close()


def test_a_model_that_comes_back_finds_its_state_behind_until_the_next_event(store: Store) -> None:
    store.write("m1", 1)
    assert store.reaches("m1")
    store.write("m2", 2)
    assert (store.reaches("m1"), store.reaches("m2")) == (False, True)
    view = store.view("m1")
    assert view.state is not None
    assert (view.state.offset, view.has_history) == (1, True)
    store.write("m1", 3)
    assert (store.reaches("m1"), store.reaches("m2")) == (True, False)


def test_a_record_that_changes_nothing_leaves_a_state_as_good_as_it_was(store: Store) -> None:
    store.write("m1", 1)
    store.write("m2", 2)
    store.write("m2", 3, "keep")
    assert (store.reaches("m1"), store.reaches("m2")) == (False, True)
    store.write("m1", 4, "keep")
    assert not store.reaches("m1")


def test_a_dropped_state_of_one_model_leaves_the_others_behind(store: Store) -> None:
    store.write("m2", 1)
    store.write("m1", 2, "drop")
    assert store.view("m1").state is None
    assert not store.reaches("m2")


def test_what_came_after_a_forget_has_a_state_again_with_the_next_event(store: Store) -> None:
    store.writer.add_model("m1")
    store.write("m1", 1)
    store.write("m1", 1, "keep", forgotten={3: 0})
    assert store.view("m1").state is None
    store.write("m1", 2)
    assert store.reaches("m1")


def test_a_state_without_a_history_says_so(store: Store) -> None:
    store.write("m1", 1)
    with redis.Redis.from_url(store.url) as client:
        client.delete(state_layout.history_key(state_layout.home_of("ann", store.epoch)))
    view = store.view("m1")
    assert (view.state is not None, view.has_history, view.reaches_history) == (True, False, False)
    assert not store.view("m9").has_history
