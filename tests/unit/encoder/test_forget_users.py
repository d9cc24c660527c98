"""Who is forgotten leaves nothing behind, whatever crashes in between, and counts again afterwards."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import NOW_MS, VOCABULARY, Crash, append, forget, forgets_on, handler_on, interaction

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.attributions import Attribution, ForgetUpTo, Undo
from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import Interaction
from services.encoder.domain import EncodedStates, EncodeJob, cache_key
from services.encoder.models import Model
from services.encoder.server import DescribeUser
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import Conflict, DependencyUnavailable, PreconditionFailed
from services.user_state.forgetting import Forgotten
from services.user_state.layout import home_of
from services.user_state.values import UserHistory

USERS = [f"user-{number}" for number in range(3)]


class Process:
    """An encoder process on ports that outlive it."""

    def __init__(
        self,
        stream: MemoryStream,
        store: MemoryStore,
        outbox: MemoryOutbox,
        forgets: MemoryForgetLog,
        plan: Callable[[str], str] = lambda _: "no",
        **given: Any,
    ) -> None:
        self.stream, forgotten = stream, Forgotten()
        self.encoder = HashEncoder()
        self.apply = handler_on(store, outbox, plan=plan, forgotten=forgotten)
        self.forgets = forgets_on(forgets, store, outbox, forgotten, plan, self.encoder, **given)
        self.resync()

    def resync(self, partitions: Collection[int] | None = None) -> None:
        """partitions: whose users this process forgets."""
        self.apply.resync(self.stream)
        self.forgets.resync(self.apply.progress.epoch, self.stream.end_offsets(), partitions)

    def turn(self, max_records: int = 1_000) -> int:
        self.forgets.follow()
        records = self.stream.poll(0, max_records)
        self.apply.apply(records)
        self.stream.commit(self.apply.progress.committable())
        return len(records)


class World:
    """The ports, and a way to run one process after another on them until everything is applied."""

    def __init__(self, num_partitions: int = 2) -> None:
        self.stream, self.store = MemoryStream(num_partitions), MemoryStore()
        self.outbox, self.forgets = MemoryOutbox(), MemoryForgetLog()

    def process(self, plan: Callable[[str], str] = lambda _: "no", **given: Any) -> Process:
        return Process(self.stream, self.store, self.outbox, self.forgets, plan, **given)

    def settle(self, fates: list[str] | None = None, batch: int = 1_000) -> None:
        """Run processes until one gets through; each of `fates` is one call's."""
        left = fates if fates is not None else []
        while True:
            try:
                process = self.process(lambda _: left.pop() if left else "no")
                while process.turn(batch):
                    pass
            except Crash:
                continue
            return

    def users(self) -> dict[str, UserHistory]:
        return dict(self.store.load_users(USERS, self.store.epoch() or ""))

    def readable(self) -> tuple[object, ...]:
        """What a reader of the store sees of the users."""
        events = {user: found.events for user, found in self.users().items()}
        states = {key: state.query_state for key, state in self.store.states.items()}
        return events, {user: seen for user, seen in self.store.seen.items() if seen}, states


def folded(outbox: MemoryOutbox) -> dict[tuple[int, int], Attribution]:
    """What stands after a reader folded the log: each place once, without what is undone or forgotten."""
    undone = {message.undoes for message in outbox.attributions if isinstance(message, Undo)}
    voided = [message for message in outbox.attributions if isinstance(message, ForgetUpTo)]
    standing: dict[tuple[int, int], Attribution] = {}
    for message in outbox.attributions:
        if not isinstance(message, Attribution):
            continue
        place = (message.partition, message.offset)
        is_void = any(
            void.user_pseudonym == message.user_pseudonym and message.offset <= void.up_to.get(message.partition, -1)
            for void in voided
        )
        if place not in undone and not is_void:
            standing.setdefault(place, message)
    return standing


def write(world: World, events: Sequence[Interaction]) -> None:
    for event in events:
        append(world.stream, event, partition_of(event.user_id))


def partition_of(user_id: str) -> int:
    return int(user_id == "user-1")


@st.composite
def histories(draw: st.DrawFn, prefix: str) -> list[Interaction]:
    """Events of few users, late and repeated ones among them, and undos of them."""
    found = []
    for number in range(draw(st.integers(0, 25))):
        user = draw(st.integers(0, 2))
        if draw(st.integers(0, 6)) == 0:
            undone = f"{prefix}-{draw(st.integers(0, max(0, number - 1)))}"
            found.append(interaction(user, item_id="", event_id=f"{prefix}-u{number}", undoes_event_id=undone))
        else:
            time = NOW_MS + draw(st.integers(-20, 0)) * 1_000
            event_id = f"{prefix}-{draw(st.integers(0, 9))}" if draw(st.booleans()) else f"{prefix}-n{number}"
            found.append(interaction(user, draw(st.integers(45, 52)), event_id=event_id, event_time_ms=time))
    return found


fates = st.lists(st.sampled_from(["no"] * 6 + ["before", "after", "partly"]), max_size=40)


@pytest.fixture
def world() -> World:
    return World()


@settings(max_examples=200, deadline=None)
@given(histories("a"), histories("b"), st.integers(0, 2), fates, st.integers(1, 9))
def test_after_a_forget_everything_is_as_if_the_user_had_never_been_seen(
    before: list[Interaction], after: list[Interaction], user: int, plan: list[str], batch: int
) -> None:
    world = World()
    write(world, before)
    world.settle()
    ends = world.stream.end_offsets()
    world.forgets.append(forget(user, p0=ends[0] - 1, p1=ends[1] - 1))
    world.settle(list(plan), batch)
    write(world, after)
    world.settle(list(plan), batch)

    # The same log, but what is void was void before anybody read it.
    never = World()
    write(never, before)
    write(never, after)
    never.forgets.append(forget(user, p0=ends[0] - 1, p1=ends[1] - 1))
    never.settle()

    assert world.readable() == never.readable()
    assert folded(world.outbox) == folded(never.outbox)


@settings(max_examples=150, deadline=None)
@given(histories("a"), histories("b"), st.integers(0, 2), fates, st.integers(1, 9))
def test_a_void_record_leaves_a_user_as_if_it_had_not_been_written(
    before: list[Interaction], after: list[Interaction], user: int, plan: list[str], batch: int
) -> None:
    world = World()
    write(world, before)
    write(world, after)
    split = {p: sum(partition_of(event.user_id) == p for event in before) for p in (0, 1)}
    world.forgets.append(forget(user, p0=split[0] - 1, p1=split[1] - 1))
    world.settle(list(plan), batch)

    without = World()
    write(without, [event for event in before if event.user_id != f"user-{user}"])
    write(without, after)
    without.settle()

    def contents(world: World) -> tuple[object, ...]:
        events = {u: [(e.event_time_ms, e.item_id) for e in found.events] for u, found in world.users().items()}
        attributions = sorted(
            (a.user_pseudonym, a.event_id, a.item_id, a.state.components, a.event_time_ms)
            for a in folded(world.outbox).values()
        )
        return events, attributions, {u: seen for u, seen in world.store.seen.items() if seen}

    assert contents(world) == contents(without)


@settings(max_examples=150, deadline=None)
@given(histories("a"), histories("b"), st.integers(0, 2), st.integers(1, 9))
def test_what_came_while_a_forget_was_on_its_way_leaves_no_state_of_what_is_void(
    before: list[Interaction], racing: list[Interaction], user: int, batch: int
) -> None:
    world = World()
    write(world, before)
    ends = world.stream.end_offsets()
    write(world, racing)
    world.settle()
    world.forgets.append(forget(user, p0=ends[0] - 1, p1=ends[1] - 1))
    world.settle(batch=batch)

    never = World()
    write(never, before)
    write(never, racing)
    never.forgets.append(forget(user, p0=ends[0] - 1, p1=ends[1] - 1))
    never.settle()
    clean = folded(never.outbox)
    # Fewer may stand, since they are taken back; none that was made of what is void.
    for place, message in folded(world.outbox).items():
        if message.user_pseudonym == pseudonym_of(f"user-{user}", b"key"):
            assert message.state == clean[place].state


def three_events(world: World, user: int = 0) -> None:
    write(world, [interaction(user, n, event_id=f"e{user}{n}", event_time_ms=NOW_MS + n) for n in range(3)])


def test_a_forget_takes_what_was_turned_down_but_what_came_after_it(world: World) -> None:
    for number, kind in enumerate(["click", "dislike", "hide"]):
        append(world.stream, interaction(0, number, type=kind, event_id=f"e{number}"))
    world.settle()
    assert sorted(world.store.turned_down["user-0"]) == ["item-1", "item-2"]
    world.forgets.append(forget(0, p0=1))
    world.process().turn()
    assert (list(world.store.turned_down["user-0"]), set(world.store.seen["user-0"])) == (["item-2"], {"item-2"})


def test_a_forget_far_ahead_of_the_log_voids_nothing_that_comes_later(world: World) -> None:
    three_events(world)
    world.settle()
    process = world.process(ends=world.stream.end_offsets)
    world.forgets.append(forget(0, p0=10**9, p1=10**9))
    with pytest.raises(DependencyUnavailable, match=r"forgets \[0\] name positions beyond the log's end"):
        process.turn()
    process.forgets.resync(process.apply.progress.epoch, {})  # the log is known to be the same
    voided = [one for one in world.outbox.attributions if isinstance(one, ForgetUpTo)]
    assert [one.up_to for one in voided] == [{0: 2, 1: -1}]
    for item in (9, 8):
        append(world.stream, interaction(0, item, event_id=f"new {item}"))
        process.turn()
    user = world.users()["user-0"]
    assert ([event.item_id for event in user.events], user.forgotten) == (["item-9", "item-8"], {0: 2, 1: -1})
    world.forgets.append(forget(0, "all", p0=4))
    process.turn()
    assert world.users()["user-0"].events == []


def test_states_of_every_model_version_go_and_caches_are_dropped(world: World) -> None:
    three_events(world)
    world.settle()
    state = world.store.states["user-0", "model-1"]
    world.store.states["user-0", "model-2"] = replace(
        state, query_state=replace(state.query_state, model_version="model-2")
    )
    world.forgets.append(forget(0, p0=2))
    process = world.process()
    assert world.store.states == {}
    assert process.encoder.dropped == [cache_key("user-0")]


def test_the_voided_user_is_published_under_the_pseudonym_that_attributions_carry(world: World) -> None:
    three_events(world)
    world.settle()
    world.forgets.append(forget(0, "f7", p0=2, p1=-1))
    world.settle()
    world.settle()
    voided = [message for message in world.outbox.attributions if isinstance(message, ForgetUpTo)]
    (pseudonym,) = {a.user_pseudonym for a in world.outbox.attributions}
    # Once: a process that starts later finds it applied.
    assert voided == [ForgetUpTo(forget_id="f7", up_to={0: 2, 1: -1}, user_pseudonym=pseudonym, recorded_ms=NOW_MS)]


def test_a_record_that_cannot_be_read_is_set_aside_and_the_next_one_is_applied(world: World) -> None:
    three_events(world)
    world.settle()
    world.forgets.append(None)
    world.forgets.append(forget(0, p0=2))
    world.settle()
    world.settle()
    (letter,) = world.outbox.dead_letters
    assert (letter.record.topic, letter.record.offset) == ("forgets", 0)
    assert letter.reason == "value='2 unreadable bytes' allowed: a whole Forget message"
    assert world.users()["user-0"].events == []


def test_an_encoder_that_is_away_does_not_hold_a_forget_up() -> None:
    class Away(HashEncoder):
        def drop(self, cache_keys: Sequence[int]) -> None:
            raise DependencyUnavailable("the inference server is away")

    world = World()
    three_events(world)
    world.settle()
    world.forgets.append(forget(0, p0=2))
    process = world.process()
    world.forgets.append(forget(2, p0=2))
    process.forgets.encoder = Away()
    process.forgets.follow()
    assert process.forgets.applied_up_to("user-2") == {0: 2}


def test_a_forget_of_another_log_stops_the_stream_with_what_to_do(world: World) -> None:
    three_events(world)
    world.forgets.append(forget(0, p0=3))
    with pytest.raises(PreconditionFailed, match="ends before offset 3, but 'forgets' voids a user up to 3"):
        world.process()


def test_a_writer_that_read_before_the_forget_cannot_bring_the_user_back(world: World) -> None:
    three_events(world)
    world.settle()
    slow = world.process()

    class Slow(HashEncoder):
        def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
            world.forgets.append(forget(0, p0=2))
            world.process()
            return super().encode(jobs)

    slow.apply.encode_batch.own = Model(VOCABULARY, Slow())
    append(world.stream, interaction(0, 5, event_id="late"))
    with pytest.raises(Conflict):
        slow.turn()
    assert world.users()["user-0"].events == []
    world.settle()
    assert [event.item_id for event in world.users()["user-0"].events] == ["item-5"]


def test_of_two_processes_that_share_the_partitions_the_one_where_the_user_is_at_home_forgets(world: World) -> None:
    for user in range(3):
        three_events(world, user)
    world.settle()
    epoch = world.store.epoch() or ""
    homes = {user: home_of(user, epoch).partition for user in USERS}
    assert set(homes.values()) == {0, 1}
    shares = {partition: world.process() for partition in (0, 1)}
    for partition, process in shares.items():
        process.resync([partition])
    world.forgets.append(forget(0, p0=2))
    at_home, other = shares[homes["user-0"]], shares[1 - homes["user-0"]]
    other.forgets.follow()
    assert len(world.users()["user-0"].events) == 3
    assert other.forgets.applied_up_to("user-0") == at_home.forgets.applied_up_to("user-0") == {}
    at_home.forgets.follow()
    assert world.users()["user-0"].events == []
    for process in shares.values():
        process.forgets.check()
        assert process.forgets.applied_up_to("user-0") == {0: 2}
        # What a model keeps of a user may be of a time when the partition was another process's.
        assert process.encoder.dropped == [cache_key("user-0")]
    published = [message for message in world.outbox.attributions if isinstance(message, ForgetUpTo)]
    assert [message.forget_id for message in published] == ["f1"]
    # Whoever takes the partition over, and whoever holds none, has nothing to do again.
    for taken in ([0, 1], []):
        assert world.process().forgets.resync(epoch, {}, taken) == 0
    assert [message for message in world.outbox.attributions if isinstance(message, ForgetUpTo)] == published


def test_a_partition_that_nobody_held_is_cleaned_by_who_takes_it_over(world: World) -> None:
    for user in range(3):
        three_events(world, user)
    world.settle()
    epoch = world.store.epoch() or ""
    home = home_of("user-0", epoch).partition
    other = world.process()
    other.resync([1 - home])
    world.forgets.append(forget(0, p0=2))
    other.forgets.follow()
    other.resync([0, 1])
    assert world.users()["user-0"].events == []
    assert other.forgets.applied_up_to("user-0") == {0: 2}


async def test_a_description_counts_what_is_there_and_says_what_was_forgotten(world: World) -> None:
    three_events(world)
    world.settle()
    process = world.process()
    describe = DescribeUser(
        reader=world.store, vocabulary=VOCABULARY, pseudonym_keys=(b"key",), applied_up_to=process.forgets.applied_up_to
    )
    before = await describe("user-0")
    assert (before.history_events, before.seen_items) == (3, 3)
    assert (before.state_model_versions, before.in_model) == (["model-1"], True)
    assert before.user_pseudonym == folded(world.outbox)[0, 1].user_pseudonym
    world.forgets.append(Forget(forget_id="f", user_id="user-0", up_to={0: 2}, requested_ms=0))
    process.turn()
    after = await describe("user-0")
    assert (after.history_events, after.seen_items, after.state_model_versions) == (0, 0, [])
    assert [(at.partition, at.offset) for at in after.forgotten_up_to] == [(0, 2)]
