"""Redis is full and takes keys with a time to live away: people are lost below the watermark, leases go first.

The in-memory store is kinder than Redis: nothing in it can be evicted. `FragileStore.evict` takes a user's keys away
as `volatile-ttl` does; epoch and watermarks have no time to live and stay.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from answers import recommend, silently_shown
from fakes.encoder import MemoryStream
from fakes.leases import MemoryLeases
from refresher.refresher_scene import World, make_rules
from state_scene import ANN, NOW_MS, QUICK, EncoderProcess, FragileStore, append, append_all, interaction, replay

from services.platform.errors import DependencyUnavailable
from services.refresher.config import RefresherSettings
from services.user_state import restore_users
from services.user_state.values import DEFAULT_TTL_SECONDS, AdvanceStep

COMPOSE = Path(__file__).parents[3] / "docker-compose.yml"


def evicted() -> tuple[MemoryStream, FragileStore]:
    """Five events of Ann are applied, then Redis evicts her keys."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    EncoderProcess(stream, store).settle()
    assert store.contents() == replay(stream)
    store.evict([ANN])
    return stream, store


def test_a_retry_of_an_event_of_an_evicted_user_does_not_count_again() -> None:
    stream, store = evicted()
    retry = append(stream, interaction("b", event_id="ann-1", second=1))
    EncoderProcess(stream, store).settle()
    counted = [(event.item_id, event.offset) for event in store.load_users([ANN], store.epoch() or "")[ANN].events]
    assert ("b", retry) not in counted


async def test_an_answer_for_an_evicted_user_is_right_or_says_that_it_is_not() -> None:
    _, store = evicted()
    answer, _ = await recommend(store, offset=4)
    assert silently_shown(answer, seen="abcde") == []


async def test_an_answer_for_a_user_whose_keys_are_there_shows_nothing_seen() -> None:
    """The same question without the eviction, so that the one above fails for the eviction alone."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    EncoderProcess(stream, store).settle()
    answer, _ = await recommend(store, offset=4)
    assert answer.token_honoured
    assert [item.item_id for item in answer.items] == ["f"]


def first_evicted(policy: str, ttl_ms: dict[str, int]) -> str | None:
    """The key that a full Redis takes first; None: it refuses writes instead."""
    return min(ttl_ms, key=lambda key: ttl_ms[key]) if policy == "volatile-ttl" else None


def test_a_full_redis_takes_no_lease_from_a_live_refresher() -> None:
    """Two refreshers and one partition. The policy is the one that the compose file starts Redis with; the times to
    live are the defaults of the processes that write the keys."""
    command = yaml.safe_load(COMPOSE.read_text())["services"]["redis"]["command"]
    lease_ms = RefresherSettings.model_fields["lease_ms"].default
    gone = first_evicted(
        command[command.index("--maxmemory-policy") + 1], {"lease": lease_ms, "user": 1000 * DEFAULT_TTL_SECONDS}
    )
    world = World(make_rules())
    first, second = MemoryLeases(world.table, "first"), MemoryLeases(world.table, "second")
    for leases in (first, second):
        leases.start([0])
        leases.holding()
    assert first.holding().terms == {0: 1}
    if gone == "lease":
        world.table.leases.clear()
    second.holding()
    assert (first.holding().terms, second.holding().terms) == ({0: 1}, {})


class FullStore(FragileStore):
    """Takes keys away all the time, and is looked through in four parts of a second each."""

    now_ms, looks, parts = NOW_MS, 0, 0

    def find_lost(self, partitions: Collection[int], epoch: str) -> Iterator[Collection[str]]:
        self.looks += 1
        self._removed += 1
        for _ in range(3):
            self.now_ms, self.parts = self.now_ms + 1_000, self.parts + 1
            yield ()
        yield from super().find_lost(partitions, epoch)


def test_looking_for_lost_users_of_a_full_store_leaves_time_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_users, "_LOOK_S", 0.0)
    stream, store = MemoryStream(1), FullStore()
    append_all(stream, "abcde")
    process = EncoderProcess(stream, store)
    restore = process.consumer._handler._restore
    assert restore is not None
    restore.clock_ms = lambda: store.now_ms
    process.settle()
    store.now_ms += 10_000
    store.evict([ANN])
    parts, looks = store.parts, store.looks
    append(stream, interaction("a", user="bob"))
    process.consumer.step()
    # Bob's event is applied between two parts; Ann is brought back by the turns that follow.
    assert (store.history("bob"), store.parts - parts) == ("a", 1)
    process.settle()
    assert store.contents([ANN, "bob"]) == replay(stream, [ANN, "bob"])
    # The store took keys away since, and is left alone for as long as the last look took.
    process.settle()
    assert store.looks == looks + 1
    store.now_ms += 3_000
    process.settle()
    assert store.looks == looks + 2


def test_a_scan_that_failed_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, store = evicted()
    find_lost, failures = store.find_lost, [DependencyUnavailable("redis: restarting")]

    def fails_once(partitions: Collection[int], epoch: str) -> Iterator[Collection[str]]:
        if failures:
            raise failures.pop()
        yield from find_lost(partitions, epoch)

    monkeypatch.setattr(store, "find_lost", fails_once)
    EncoderProcess(stream, store, limits=replace(QUICK, look_for_lost_every_s=1e9)).settle()
    assert store.contents() == replay(stream)


def test_a_failover_before_the_watermark_moves_costs_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis loses the written user without an eviction: a replica that lags takes over."""
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abc")
    process = EncoderProcess(stream, store).settle()
    advance, replicas = store.advance, [store.older_copy()]
    append_all(stream, "de", first=3)

    def after_failover(steps: Sequence[AdvanceStep], epoch: str) -> None:
        if replicas:
            store.fall_back_to(replicas.pop())
        advance(steps, epoch)

    monkeypatch.setattr(store, "advance", after_failover)
    process.settle()
    assert store.contents() == replay(stream)


def test_a_user_whom_a_client_deleted_is_restored_though_redis_counts_no_removal() -> None:
    stream, store = MemoryStream(1), FragileStore()
    append_all(stream, "abcde")
    process = EncoderProcess(stream, store, limits=replace(QUICK, look_for_lost_every_s=0.0)).settle()
    store.evict([ANN])
    store._removed -= 1
    process.settle()
    assert store.contents() == replay(stream)
