"""However records are cut into batches, delivered again or interrupted, the effect is that of applying each once."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes.encoder import MemoryOutbox, MemoryStream
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import NOW_MS, VOCABULARY, Crash, append, drain, handler_on, interaction

from services.algorithms.bundles.event_schema import EventSchema
from services.algorithms.items.popularity import count_at
from services.contracts.topics.attributions import Attributed, Attribution, ForgetUpTo, Undo
from services.contracts.topics.interactions import Interaction, decode_interaction
from services.contracts.topics.search_clicks import ClickRecord
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import Conflict
from services.platform.stream.records import DeadLetter

PARTITIONS = 2


@st.composite
def interactions(draw: st.DrawFn) -> Interaction | bytes:
    """Valid events (late, repeated, unknown items, without ids), undos, and broken records, for few users."""
    kind = draw(st.sampled_from(["event"] * 8 + ["undo"] * 2 + ["broken"]))
    if kind == "broken":
        return draw(st.sampled_from([b"", b"\x0a\xff", b'{"user_id": "user-0"']))
    user = draw(st.integers(0, 2))
    event_id = draw(st.sampled_from(["", *(f"event-{number}" for number in range(12))]))
    if kind == "undo":
        undone = f"event-{draw(st.integers(0, 11))}"
        return interaction(user, item_id="", event_id=event_id and f"undo-{event_id}", undoes_event_id=undone)
    time = NOW_MS + draw(st.integers(-20, 0)) * 1_000
    kinds = [{}, {}, {"type": "search_click", "query": "space movies"}, {"type": "dislike"}]
    changes: dict[str, str] = draw(st.sampled_from(kinds))
    return interaction(user, draw(st.integers(48, 52)), event_id=event_id, event_time_ms=time, **changes)


def filled(records: list[tuple[int, Interaction | bytes]]) -> MemoryStream:
    stream = MemoryStream(PARTITIONS)
    for partition, record in records:
        if isinstance(record, bytes):
            stream.append(partition, b"user-0", record, NOW_MS)
        else:
            append(stream, record, partition)
    return stream


def effect(store: MemoryStore) -> tuple[object, ...]:
    """Everything that a reader of the store could see."""
    epoch = store.epoch() or ""
    users = store.load_users([f"user-{number}" for number in range(3)], epoch)
    histories = {user: (found.events, found.recent, found.positions) for user, found in users.items()}
    states = {key: state.query_state for key, state in store.states.items()}
    progress = store.progress(range(PARTITIONS), epoch)
    counts = {p: {n: c for n, c in progress[p].counts.items() if c} for p in progress}
    watermarks = {p: progress[p].watermark for p in progress}
    return histories, store.seen, store.turned_down, states, counts, watermarks


def ones(outbox: MemoryOutbox) -> tuple[dict[object, object], set[object], dict[object, object]]:
    """What a reader that knows records by their source position keeps."""
    attributions = {(a.partition, a.offset): a for a in outbox.attributions if isinstance(a, Attribution | Undo)}
    letters = {(letter.record.partition, letter.record.offset) for letter in outbox.dead_letters}
    return (
        attributions,
        letters,
        {(c.partition, c.offset): c for c in outbox.clicks if not isinstance(c, ForgetUpTo)},
    )


# One user's records come through one partition, as the partitioner has it; user-2's through both, as a foreign
# partitioner might. The order across partitions is then the poll's, so the comparison keeps the polls alike.
streams_of_records = st.lists(
    interactions().map(lambda record: (int(isinstance(record, Interaction) and record.user_id == "user-1"), record)),
    max_size=40,
)
fates = st.lists(st.sampled_from(["no"] * 6 + ["before", "after", "partly"]), max_size=60)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(streams_of_records, fates, sizes)
def test_any_crashes_and_redeliveries_end_as_if_each_record_was_applied_once(
    records: list[tuple[int, Interaction | bytes]], plan: list[str], batch_sizes: list[int]
) -> None:
    wanted_store, wanted_outbox = MemoryStore(), MemoryOutbox()
    drain(handler_on(wanted_store, wanted_outbox), filled(records), (1,))

    stream, store, outbox = filled(records), MemoryStore(), MemoryOutbox()
    left = list(plan)

    def fate(_: str) -> str:
        return left.pop() if left else "no"

    for _ in range(len(plan) + 1):
        try:
            drain(handler_on(store, outbox, plan=fate), stream, batch_sizes)
            break
        except Crash:
            continue
    assert effect(store) == effect(wanted_store)
    assert ones(outbox) == ones(wanted_outbox)
    found, wanted = popular(store), popular(wanted_store)
    if all(isinstance(record, bytes) or not record.undoes_event_id for _, record in records):
        # Of events that the window has lost only the times, seconds apart, are not known.
        assert found == pytest.approx(wanted, rel=1e-4)
    # What an undo takes back, a crash may leave to fade.
    assert all(found.get(item_id, 0.0) >= count * 0.999 for item_id, count in wanted.items())


def popular(store: MemoryStore) -> dict[str, float]:
    """What items count now."""
    counts: Counter[str] = Counter()
    for one in asyncio.run(store.read_popular()):
        counts.update({item: count_at(level, NOW_MS, one.half_life_s) for item, level in one.levels.items()})
    return dict(counts)


def test_what_is_taken_is_popular_by_what_it_speaks_for_it_and_undone_it_is_not() -> None:
    half_life_ms = 7 * 86_400_000
    events = [
        interaction(0, 1, event_id="click"),
        interaction(0, 1, event_id="click"),
        interaction(1, 1, event_id="old", event_time_ms=NOW_MS - half_life_ms),
        interaction(0, 2, event_id="stars", type="rating", value=5.0),
        interaction(0, 3, event_id="few", type="rating", value=2.0),
        interaction(0, 4, event_id="no", type="dislike"),
        interaction(0, 5, event_id="seen", type="impression"),
        interaction(0, 6, event_id="odd", type="unheard of"),
        interaction(0, 7, event_id="mistake"),
        interaction(0, event_id="undo", item_id="", undoes_event_id="mistake"),
        interaction(0, 999, event_id="new"),
    ]
    store = MemoryStore()
    drain(handler_on(store, MemoryOutbox()), filled([(0, event) for event in events]))
    assert popular(store) == pytest.approx({"item-1": 1.5, "item-2": 1.0, "item-999": 1.0})


VIEWS = EventSchema.parse(
    b"types: {view: {role: positive, history: false, weight: 0.25}, click: {role: positive, weight: 0.5}, "
    b"buy: {role: positive}, dislike: {role: negative}}",
    "views",
)


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("kind", ["click", "view", "buy"])
def test_one_person_is_as_popular_as_one_event(batch: int, kind: str) -> None:
    """However often, with other items in between, of types that histories keep and of those that they keep out."""
    events = [
        one
        for number in range(300)
        for one in (
            interaction(0, 1, event_id=f"e{number}", type=kind),
            interaction(0, 10 + number % 20, event_id=f"o{number}"),
        )
    ]
    events += [interaction(user, 2, event_id=f"u{user}", type=kind) for user in range(1, 4)]
    store = MemoryStore()
    vocabulary = replace(VOCABULARY, schema=VIEWS)
    drain(handler_on(store, MemoryOutbox(), vocabulary), filled([(0, event) for event in events]), (batch,))
    found, weight = popular(store), VIEWS.weight_for(kind, 1.0)
    assert found["item-1"] == pytest.approx(weight)
    assert found["item-2"] == pytest.approx(3 * weight)


def test_of_a_persons_events_the_strongest_counts_and_what_is_left_of_it_when_it_is_taken_back() -> None:
    half_life_ms = 7 * 86_400_000
    store, stream = MemoryStore(), MemoryStream(PARTITIONS)
    handler = handler_on(store, MemoryOutbox(), replace(VOCABULARY, schema=VIEWS))
    for event, counts in [
        (interaction(0, 1, event_id="old", type="buy", event_time_ms=NOW_MS - half_life_ms), 0.5),
        (interaction(0, 1, event_id="view", type="view"), 0.5),
        (interaction(0, 1, event_id="no", type="dislike"), 0.5),
        (interaction(0, 1, event_id="buy", type="buy"), 1.0),
        (interaction(0, 1, event_id="again", type="buy"), 1.0),
        (interaction(1, 1, event_id="other", type="buy"), 2.0),
        (interaction(0, item_id="", event_id="undo-1", undoes_event_id="again"), 2.0),
        (interaction(0, item_id="", event_id="undo-2", undoes_event_id="buy"), 1.5),
        (interaction(0, item_id="", event_id="undo-3", undoes_event_id="old"), 1.0),
    ]:
        append(stream, event)
        drain(handler, stream)
        assert popular(store) == pytest.approx({"item-1": counts}), event.event_id


@settings(max_examples=150, deadline=None)
@given(streams_of_records, st.integers(0, 40), sizes)
def test_a_lost_state_store_is_filled_again_without_second_attributions(
    records: list[tuple[int, Interaction | bytes]], applied_before: int, batch_sizes: list[int]
) -> None:
    wanted_store, wanted_outbox = MemoryStore(), MemoryOutbox()
    drain(handler_on(wanted_store, wanted_outbox), filled(records), (1,))

    stream, store, outbox = filled(records), MemoryStore(), MemoryOutbox()
    handler = handler_on(store, outbox)
    handler.resync(stream)
    if batch := stream.poll(0, applied_before):
        handler.apply(batch)
        stream.commit(handler.progress.committable())
    store.wipe()
    drain(handler, stream, batch_sizes)

    assert effect(store) == effect(wanted_store)
    places = Counter((a.partition, a.offset) for a in outbox.attributions if isinstance(a, Attribution | Undo))
    clicks = Counter((c.partition, c.offset) for c in outbox.clicks if not isinstance(c, ForgetUpTo))
    assert ones(outbox)[0].keys() == ones(wanted_outbox)[0].keys()
    assert ones(outbox)[2] == ones(wanted_outbox)[2]
    assert all(count == 1 for count in (*places.values(), *clicks.values()))


@settings(max_examples=150, deadline=None)
@given(streams_of_records, sizes)
def test_every_record_is_counted_exactly_once(
    records: list[tuple[int, Interaction | bytes]], batch_sizes: list[int]
) -> None:
    stream, store = filled(records), MemoryStore()
    drain(handler_on(store, MemoryOutbox()), stream, batch_sizes)
    progress = store.progress(range(PARTITIONS), store.epoch() or "")
    total = Counter[str]()
    for partition in progress.values():
        total.update(partition.counts)
    assert total["applied"] + total["duplicates"] + total["dead_lettered"] == len(records)


@settings(max_examples=100, deadline=None)
@given(streams_of_records)
def test_two_consumers_of_one_partition_do_not_apply_twice(records: list[tuple[int, Interaction | bytes]]) -> None:
    wanted = MemoryStore()
    drain(handler_on(wanted, MemoryOutbox()), filled(records), (1,))

    store, outbox = MemoryStore(), MemoryOutbox()
    first, second = filled(records), filled(records)
    slow = handler_on(store, outbox)
    slow.resync(first)
    held = first.poll(0, 5)
    drain(handler_on(store, outbox), second, (3,))
    # Either the other one had nothing of these users left to change, or the slow one notices.
    with contextlib.suppress(Conflict):
        slow.apply(held)
    drain(slow, first, (2,))
    assert effect(store) == effect(wanted)


def test_a_state_is_made_of_the_window_and_names_the_newest_position() -> None:
    stream, store = MemoryStream(1), MemoryStore()
    for number in range(10):
        append(stream, interaction(0, number, event_time_ms=NOW_MS + number * 1_000, event_id=f"e{number}"))
    drain(handler_on(store, MemoryOutbox(), replace(VOCABULARY, max_history=8)), stream)
    history = store.load_users(["user-0"], store.epoch() or "")["user-0"]
    # At 8 events the oldest 2 go, at 8 again two more.
    assert [event.item_id for event in history.events] == [f"item-{number}" for number in range(4, 10)]
    state = store.states["user-0", "model-1"]
    assert (state.offset, state.event_time_ms) == (9, NOW_MS + 9_000)
    assert len(store.seen["user-0"]) == 10


@settings(max_examples=150, deadline=None)
@given(streams_of_records, fates, sizes)
def test_a_batch_goes_out_in_source_order_and_undos_name_what_counted(
    records: list[tuple[int, Interaction | bytes]], plan: list[str], batch_sizes: list[int]
) -> None:
    stream, store, outbox = filled(records), MemoryStore(), MemoryOutbox()
    batches: list[list[tuple[int, int]]] = []
    publish = outbox.publish

    def watch(
        attributions: Sequence[Attributed], dead_letters: Sequence[DeadLetter], clicks: Sequence[ClickRecord] = ()
    ) -> None:
        batches.append([(a.partition, a.offset) for a in attributions if isinstance(a, Attribution | Undo)])
        batches.append([(c.partition, c.offset) for c in clicks if not isinstance(c, ForgetUpTo)])
        publish(attributions, dead_letters, clicks)

    outbox.publish = watch  # type: ignore[method-assign]
    left = list(plan)
    for _ in range(len(plan) + 1):
        try:
            drain(handler_on(store, outbox, plan=lambda _: left.pop() if left else "no"), stream, batch_sizes)
            break
        except Crash:
            continue
    assert all(batch == sorted(batch) for batch in batches)
    given = {(p, o): record for p, log in enumerate(stream.log) for o, record in enumerate(log)}
    for message in outbox.attributions:
        if isinstance(message, Undo):
            undone, undo = (
                decode_interaction(given[place].value, (), given[place].key)
                for place in (message.undoes, (message.partition, message.offset))
            )
            assert (undone.user_id, undone.item_id) == (undo.user_id, message.item_id)
            assert (undone.event_id, message.event_id) == (undo.undoes_event_id, undo.event_id or message.event_id)
            assert message.recorded_ms == NOW_MS
