"""The refresher's thread, step by step over in-memory ports: takeover, crashes, publication, listings, faults."""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fakes.refresher import MemoryCheckpoints, MemoryLog, MemoryOutbox
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from refresher_scene import (
    P_X,
    START_MS,
    D,
    World,
    fold_all,
    interaction,
    log_of,
    make_rules,
    random_records,
    readers_view,
)

from services.algorithms.scoring.states import ItemStates
from services.gateway.adapters.peers import offsets_of
from services.platform.errors import DependencyUnavailable
from services.platform.stream.follower import TurnClock
from services.platform.stream.kafka import partition_for
from services.platform.stream.records import DeadLetter, SourceRecord
from services.refresher.domain.records import Entry, Forgetting
from services.refresher.handlers.publish import ContentStates

RULES = make_rules()


def world_of(seed: int, count: int = 120, *, rules=RULES, poll_records: int = 16) -> World:
    return World(rules, log=log_of(random_records(seed, count), poll_records=poll_records))


class Dying(MemoryOutbox):
    """A process that is killed inside its n-th publication, after part of it was written."""

    def __init__(self, inner: MemoryOutbox, at: int, share: float) -> None:
        super().__init__()
        self._inner, self._at, self._share = inner, at, share

    def publish(self, deltas, unreadable, tombstones=()):
        self._at -= 1
        if self._at < 0:
            self._inner.publish(deltas[: int(len(deltas) * self._share)], [])
            raise KeyboardInterrupt
        self._inner.publish(deltas, unreadable, tombstones)


def live_states(running) -> dict[str, float]:
    """Item -> share, as the state itself says it should be published."""
    (state,) = running.held.partitions.values()
    items = [item for item in state.sums if not running.publisher.reasons(state, [item])[0]]
    return dict(zip(items, running.publisher.model_weights(state, items).tolist(), strict=True))


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    deaths=st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1)), max_size=5),
    max_changes=st.sampled_from([3, 7, 1000]),
    checkpoint_s=st.sampled_from([0.0, 1e9]),
)
def test_after_any_deaths_readers_hold_what_the_state_says(
    seed: int, deaths: list[tuple[int, float]], max_changes: int, checkpoint_s: float
) -> None:
    world = world_of(seed, rules=make_rules(max_remembered=6))
    for item in ("item-12", "item-13"):
        world.log.put(item)
    world.log.put("item-3", withdrawn=True)
    for at, share in deaths:
        outbox = Dying(world.outbox, at, share)
        running = world.refresher(outbox=outbox, max_changes=max_changes, checkpoint_s=checkpoint_s)
        # Killed in a publication, or where it stands after as many turns.
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(at + 4):
                running.refresher.step()
        world.now_ms += 10_000
    last = world.settled(max_changes=max_changes)
    batch = fold_all(world.rules, world.log, listed={"item-12": False, "item-13": False, "item-3": True})
    assert last.digests() == {0: batch.digest()}
    items, entries = readers_view(world.outbox.deltas)
    assert {item: change.model_share for item, change in items.items()} == pytest.approx(live_states(last), abs=0.011)
    assert entries.keys() == {entry.entry_id for entry in batch.remembered.memory}


def test_a_checkpoint_is_taken_up_where_it_ends() -> None:
    world = world_of(1)
    first = world.settled()
    first.refresher.finish()
    published = len(world.outbox.deltas)
    assert world.settled().digests() == {0: fold_all(RULES, world.log).digest()}
    assert len(world.outbox.deltas) == published


@pytest.mark.parametrize("damage", ["torn", "altered", "empty", "another"])
@pytest.mark.parametrize("both", [False, True])
def test_a_damaged_checkpoint_is_refused_and_the_older_one_or_the_log_is_used(damage: str, both: bool) -> None:
    world = world_of(2)
    world.settled().refresher.finish()
    saved = world.checkpoints.saved[0]
    assert len(saved) == 2
    for place in range(2 if both else 1):
        data = saved[place]
        if damage == "torn":
            saved[place] = data[: len(data) // 2]
        elif damage == "altered":
            middle = len(data) // 2
            saved[place] = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        elif damage == "empty":
            saved[place] = b""
        else:
            saved[place] = b"SOMETHING ELSE"
    assert world.settled().digests() == {0: fold_all(RULES, world.log).digest()}


def test_a_checkpoint_of_another_policy_is_folded_anew_and_what_readers_held_of_it_is_replaced() -> None:
    world = world_of(3)
    world.settled().refresher.finish()
    world.rules = make_rules(max_remembered=4)
    second = world.settled()
    batch = fold_all(world.rules, world.log)
    assert second.digests() == {0: batch.digest()}
    _, entries = readers_view(world.outbox.deltas)
    assert entries.keys() == {entry.entry_id for entry in batch.remembered.memory}


@pytest.mark.parametrize("records", [random_records(4, 40)[:20], random_records(5, 90)], ids=["shorter", "longer"])
def test_a_topic_that_was_made_anew_is_noticed_even_when_it_is_longer_than_before(records: list[Entry]) -> None:
    world = world_of(4, count=40)
    world.settled().refresher.finish()
    world.log = log_of(records)
    assert world.settled().digests() == {0: fold_all(RULES, world.log).digest()}


def test_an_item_is_published_once_it_is_listed_and_enough_users_stand_behind_it() -> None:
    rng = np.random.default_rng(5)
    world = World(RULES)
    running = world.refresher(min_users=3)
    for user in ("a", "a", "b"):
        place = (0, len(world.log.entries[0]))
        world.log.append(0, interaction(rng, place=place, item="new", user=user))
    running.settle()
    assert running.describe.item("new").reason == "unknown item"
    world.log.put("new")
    running.settle()
    assert running.describe.item("new").reason == "too few users"
    assert readers_view(world.outbox.deltas)[0] == {}
    world.log.append(0, interaction(rng, place=(0, 9), item="new", user="c"))
    running.settle()
    found = running.describe.item("new")
    assert (found.reason, found.num_users, found.num_interactions, found.model_share) == ("", 3, 4, 0.0)
    items, _ = readers_view(world.outbox.deltas)
    assert items["new"].num_interactions == 4
    assert items["new"].gate == pytest.approx(RULES.items.mean_gate)


class Lengths:
    """Texts to states: a direction for each length of a title. Counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def of(self, titles, categories):
        self.asked += titles
        rows = np.zeros((len(titles), P_X, D), np.float32)
        for place, title in enumerate(titles):
            rows[place, :, len(title) % D] = 1
        return ItemStates(components=rows, gate=np.tile(RULES.items.mean_gate, (len(titles), 1)))


def test_a_text_speaks_for_a_new_item_until_enough_users_do_and_again_when_they_are_gone() -> None:
    rng = np.random.default_rng(60)
    texts = Lengths()
    world = World(RULES)
    running = world.refresher(min_users=2, content=ContentStates(texts))
    world.log.put("new", title="ab")
    running.settle()
    items, _ = readers_view(world.outbox.deltas)
    assert items["new"].components[:, 2].tolist() == [1, 1]
    assert (items["new"].model_share, items["new"].num_interactions) == (0, 0)
    world.log.put("new", title="abc")
    running.settle()
    assert readers_view(world.outbox.deltas)[0]["new"].components[:, 3].tolist() == [1, 1]
    for number, user in enumerate(("a", "b")):
        world.log.append(0, interaction(rng, place=(0, number), item="new", user=user))
    running.settle()
    assert readers_view(world.outbox.deltas)[0]["new"].num_interactions == 2
    world.log.append(0, Forgetting(0, "a", {0: 100}))
    running.settle()
    assert readers_view(world.outbox.deltas)[0]["new"].components[:, 3].tolist() == [1, 1]
    assert texts.asked == ["ab", "abc"]
    running.refresher.finish()
    world.settled(min_users=2, content=ContentStates(texts))
    assert readers_view(world.outbox.deltas)[0]["new"].components[:, 3].tolist() == [1, 1]


def test_a_snapshot_publishes_everything_again_and_changes_nothing() -> None:
    world = world_of(70)
    running = world.settled()
    before = readers_view(world.outbox.deltas)
    world.outbox.deltas.clear()
    running.held.partitions[0].mark_everything()
    running.settle()
    after = readers_view(world.outbox.deltas)
    assert [view.keys() for view in after] == [view.keys() for view in before]
    for item_id, change in after[0].items():
        assert np.array_equal(change.components, before[0][item_id].components)


def test_how_far_new_items_may_go_is_taken_from_known_items_at_the_same_records_whatever_the_polls() -> None:
    rng = np.random.default_rng(80)
    shares = []
    records = [
        interaction(rng, place=(0, n), item=f"item-{n % 12}" if n % 50 else "new", user=f"u{n}", kind="click")
        for n in range(2300)
    ]
    for poll_records in (7, 500, 4096):
        world = World(RULES, log=log_of(records[:2040], poll_records=poll_records))
        world.log.put("new")
        running = world.settled(min_users=1)
        before = np.linalg.norm(readers_view(world.outbox.deltas)[0]["new"].components, axis=1)
        for record in records[2040:]:
            world.log.append(0, record)
        running.settle()
        (state,) = running.held.partitions.values()
        assert state.counts["folded"] == 2300
        shares.append(state.new_item_policy.text)
        after = np.linalg.norm(readers_view(world.outbox.deltas)[0]["new"].components, axis=1)
        running.refresher.finish()
        again = world.settled(min_users=1)
        assert again.held.partitions[0].new_item_policy == state.new_item_policy
    assert len(set(shares)) == 1
    # Random queries say little of random items: what is learnt of them must not be long.
    assert (after < before).all() == (state.new_item_policy.least > 0.5)


def test_many_texts_take_turns_with_interactions() -> None:
    rng = np.random.default_rng(61)
    world = World(RULES)
    running = world.refresher(content=ContentStates(Lengths()))
    running.settle()
    for number in range(50):
        world.log.put(f"new-{number}", title="x")
    world.log.append(0, interaction(rng, place=(0, 0), item="item-1", user="a"))
    items: dict = {}
    while not items:
        running.refresher.step()
        items, _ = readers_view(world.outbox.deltas)
    assert "item-1" in items
    assert len(items) < 20
    running.settle()
    assert len(readers_view(world.outbox.deltas)[0]) == 51


class Away(MemoryCheckpoints):
    """Cannot be written to while `is_away`."""

    is_away = True

    def save(self, partition: int, values: Mapping[str, Any], parts: Mapping[str, bytes | None]) -> None:
        if self.is_away:
            raise DependencyUnavailable("no broker")
        super().save(partition, values, parts)


def test_checkpoints_are_saved_beside_the_folding_and_one_that_fails_is_made_good() -> None:
    world, checkpoints = world_of(1), Away()
    with ThreadPoolExecutor(1) as keeper:
        running = world.settled(checkpoints=checkpoints, keeper=keeper)
        keeper.submit(lambda: None).result()
        assert (checkpoints.saved, running.held.checkpoints) == ({}, {0: -1})
        checkpoints.is_away = False
        running.refresher.step()
        keeper.submit(lambda: None).result()
        assert running.held.checkpoints == {0: running.held.partitions[0].folded_offset}
        # From then on only what changed is handed over; the parts that did not are still there.
        world.log.append(0, interaction(np.random.default_rng(1), place=(7, 7), item="item-1", user="late"))
        running.settle()
        running.refresher.finish()
    successor = world.refresher("b", checkpoints=checkpoints)
    world.now_ms += 10_000
    successor.settle()
    assert successor.digests() == {0: fold_all(RULES, world.log).digest()}


def test_a_new_item_that_loses_its_users_is_dropped_even_by_a_successor_that_never_published_it() -> None:
    rng = np.random.default_rng(6)
    world = World(RULES)
    world.log.put("new")
    world.log.append(0, interaction(rng, place=(0, 0), item="item-1", user="z"))
    first = world.settled(min_users=2, checkpoint_s=1e9)
    first.refresher._checkpoints.keep(first.held.partitions[0])
    for number, user in enumerate(("a", "b"), start=1):
        world.log.append(0, interaction(rng, place=(0, number), item="new", user=user))
    first.settle()
    assert "new" in readers_view(world.outbox.deltas)[0]
    # Killed here: the checkpoint knows nothing of "new".
    world.log.append(0, Forgetting(0, "a", {0: 100}))
    world.now_ms += 10_000
    world.settled(min_users=2)
    assert "new" not in readers_view(world.outbox.deltas)[0]


def test_a_withdrawn_item_is_dropped_keeps_learning_and_comes_back_with_what_it_learnt() -> None:
    rng = np.random.default_rng(7)
    world = World(RULES)
    running = world.refresher()
    world.log.append(0, interaction(rng, place=(0, 0), item="item-1", user="a"))
    running.settle()
    # Withdrawn while its next change is on the way.
    world.log.append(0, interaction(rng, place=(0, 1), item="item-1", user="b"))
    world.log.put("item-1", withdrawn=True)
    running.settle()
    assert "item-1" not in readers_view(world.outbox.deltas)[0]
    assert running.describe.item("item-1").reason == "withdrawn"
    world.log.put("item-1")
    running.settle()
    assert readers_view(world.outbox.deltas)[0]["item-1"].num_interactions == 2


def test_what_was_dropped_leaves_the_topic_with_the_next_batch_of_its_writer() -> None:
    rng = np.random.default_rng(8)
    world = World(RULES)
    running = world.refresher()
    for number, (item, user) in enumerate((("item-1", "gone"), ("item-2", "stays"))):
        world.log.append(0, interaction(rng, place=(0, number), item=item, user=user))
    running.settle()
    # The item's state, and the remembered interaction.
    of_user = {one.key for one in world.outbox.deltas if one.change.item_id == "item-1"}
    assert len(of_user) == 2
    world.log.append(0, Forgetting(0, "gone", {0: 100}))
    running.settle()
    assert of_user == {one.key for one in world.outbox.deltas if one.change.dropped}
    assert not [one for one in world.outbox.records if isinstance(one, bytes)]
    world.log.append(0, interaction(rng, place=(0, 9), item="item-3", user="stays"))
    running.settle()
    tombstones = [place for place, one in enumerate(world.outbox.records) if isinstance(one, bytes)]
    assert {world.outbox.records[place] for place in tombstones} == of_user
    behind = world.outbox.records[max(tombstones) + 1 :]
    assert {one.change.item_id for one in behind} == {"item-3"}
    world.log.append(0, interaction(rng, place=(0, 10), item="item-3", user="stays"))
    running.settle()
    assert sum(isinstance(one, bytes) for one in world.outbox.records) == len(of_user)


def at_home(record: Entry, partition: int, num_partitions: int) -> Entry:
    """The same record about an item whose records go to this partition."""
    if isinstance(record, Forgetting):
        return record
    names = (f"{record.item_id}~{number}" for number in itertools.count())
    return dataclasses.replace(
        record, item_id=next(name for name in names if partition_for(name.encode(), num_partitions) == partition)
    )


def test_partitions_are_shared_given_up_to_a_newcomer_and_taken_over_from_the_dead() -> None:
    world = World(RULES, log=MemoryLog(4))
    for number in range(4):
        for record in random_records(20 + number, 60):
            world.log.append(number, at_home(record, number, 4))
    wanted = {number: fold_all(RULES, world.log, number).digest() for number in range(4)}
    first = world.settled("first")
    assert first.digests() == wanted
    second = world.refresher("second")
    for _ in range(3):
        second.refresher.step()
        first.refresher.step()
    second.settle()
    assert len(first.held.partitions) == len(second.held.partitions) == 2
    assert first.digests() | second.digests() == wanted
    # The first one dies without a word.
    world.now_ms += world.table.lease_ms + 1
    second.settle()
    assert second.digests() == wanted


def test_a_refresher_that_was_asleep_while_others_took_over_starts_from_what_they_left() -> None:
    world = world_of(10)
    sleeper = world.settled("sleeper", checkpoint_s=1e9)
    world.now_ms += world.table.lease_ms + 1
    other = world.settled("other")
    world.log.append(0, interaction(np.random.default_rng(1), place=(5, 5), item="item-1", user="z"))
    other.settle()
    other.refresher.finish()
    sleeper.settle()
    assert sleeper.digests() == {0: fold_all(RULES, world.log).digest()}


def test_unreadable_records_are_set_aside_and_the_stream_goes_on() -> None:
    rng = np.random.default_rng(12)
    world = World(RULES)
    bad = SourceRecord("attributions", 0, 0, START_MS, b"k", b"\xff\xff", ())
    world.log.append(0, interaction(rng, place=(0, 0), item="item-1", user="a"))
    world.log.append(0, DeadLetter(bad, "value=2 unreadable bytes"))
    world.log.append(0, interaction(rng, place=(0, 1), item="item-1", user="b"))
    running = world.settled()
    (letter,) = world.outbox.unreadable
    assert (letter.record.offset, letter.record.value) == (1, b"\xff\xff")
    assert running.held.partitions[0].counts["dead_lettered"] == 1
    assert running.held.partitions[0].counts["folded"] == 2


class _Unfoldable(dict):
    """A listing that breaks when asked of one item: a bug of ours."""

    def __contains__(self, item_id):
        if item_id == "poison":
            raise RuntimeError("a bug")
        return super().__contains__(item_id)


def test_a_record_that_fails_for_a_bug_is_set_aside_and_nothing_counts_twice() -> None:
    rng = np.random.default_rng(13)
    world = World(RULES)
    for number in range(9):
        item = "poison" if number == 4 else f"item-{number}"
        world.log.append(0, interaction(rng, place=(0, number), item=item, user="a"))
    running = world.refresher()
    running.refresher._opener.withdrawn = _Unfoldable()
    for _ in range(6):
        try:
            running.refresher.step()
        except RuntimeError as exc:
            running.refresher.fail(exc)
    state = running.held.partitions[0]
    assert state.folded_offset == 8
    assert state.counts["dead_lettered"] == 1
    assert sorted(state.sums) == sorted(f"item-{number}" for number in range(9) if number != 4)
    assert sum(state.sums.counts(list(state.sums))) == 8


def test_a_broker_that_goes_away_costs_nothing_but_time() -> None:
    class Flaky(MemoryOutbox):
        calls = 0

        def publish(self, deltas, unreadable, tombstones=()):
            self.calls += 1
            if self.calls % 2:
                # Some of it lands all the same.
                world.outbox.publish(deltas[:1], [])
                raise DependencyUnavailable("away")
            world.outbox.publish(deltas, unreadable, tombstones)

    world = world_of(14)
    running = world.refresher(outbox=Flaky())
    for _ in range(200):
        try:
            running.refresher.step()
        except DependencyUnavailable as exc:
            running.refresher.fail(exc)
    assert running.digests() == {0: fold_all(RULES, world.log).digest()}
    items, entries = readers_view(world.outbox.deltas)
    assert items.keys() == live_states(running).keys()
    assert entries.keys() == running.held.partitions[0].remembered.visible.keys()


def test_an_item_whose_parked_interactions_were_turned_away_is_folded_anew_when_it_is_listed() -> None:
    rng = np.random.default_rng(15)
    world = World(make_rules(max_pending=5))
    for number in range(60):
        item = f"made-up-{number % 20}"
        world.log.append(0, interaction(rng, place=(0, number), item=item, user=f"u{number}"))
    running = world.settled()
    evicted = next(f"made-up-{n}" for n in range(20) if running.held.partitions[0].pending.may_lack(f"made-up-{n}"))
    assert partition_for(evicted.encode(), 1) == 0
    world.log.put(evicted)
    running.settle()
    assert running.describe.item(evicted).num_interactions == 3
    assert evicted in readers_view(world.outbox.deltas)[0]


def test_a_user_is_not_called_forgotten_while_some_partition_has_not_folded_it() -> None:
    rng = np.random.default_rng(17)
    world = World(RULES, log=MemoryLog(num_partitions=2))
    for partition in (0, 1):
        world.log.append(partition, interaction(rng, place=(0, partition), item=f"item-{partition}", user="a"))
    world.log.append(0, Forgetting(0, "a", {0: 5}))
    running = world.settled()
    found = running.describe.user("a")
    assert (found.interactions, offsets_of(found.forgotten_up_to), found.partitions) == (1, {}, [0, 1])
    world.log.append(1, Forgetting(0, "a", {0: 4}))
    running.settle()
    found = running.describe.user("a")
    assert (found.interactions, offsets_of(found.forgotten_up_to)) == (0, {0: 4})


def test_lag_and_age_grow_while_folding_stalls_and_fall_when_it_goes_on() -> None:
    class Away(MemoryOutbox):
        away = True

        def publish(self, deltas, unreadable, tombstones=()):
            if self.away:
                raise DependencyUnavailable("away")
            super().publish(deltas, unreadable, tombstones)

    def sample(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"freshet_refresher_{name}", labels) or 0.0

    def wait_until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    now_s, registry, outbox, stalled = [0.0], CollectorRegistry(), Away(), threading.Event()
    world, records = World(RULES, log=MemoryLog(poll_records=16)), iter(random_records(5, 60))
    running = world.refresher(
        outbox=outbox, registry=registry, turns=TurnClock(clock=lambda: now_s[0]), on_stall=stalled.set
    )
    # Ready before anything fails: it is a stall then, not a start.
    running.refresher.step()
    for record in itertools.islice(records, 20):
        world.log.append(0, record)
    running.refresher.start()
    try:
        assert stalled.wait(20)
        # The turn folds what it polls, then fails to publish: what comes now is folded only once a turn gets there.
        now_s[0] += 30
        assert sample("turn_age_seconds") >= 30
        last = max(world.log.append(0, record) for record in records)
        wait_until(lambda: sample("folded", partition="0") + sample("lag_records", partition="0") == last)
        outbox.away = False
        wait_until(lambda: sample("folded", partition="0") == last and sample("lag_records", partition="0") == 0)
        wait_until(lambda: sample("turn_age_seconds") == 0)
    finally:
        outbox.away = False
        running.refresher.stop()
