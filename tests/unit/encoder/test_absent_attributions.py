"""An attribution has the state that its person would have been asked with: after the absence up to its interaction.

However the log is cut into batches, interrupted, imported or read again later, it is the same one bit for bit.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import VOCABULARY, Crash, append, drain, handler_on, interaction
from test_bulk_import import MemoryWriter, past

from services.algorithms.encoding.absence import AbsenceRows
from services.algorithms.scoring.packed_state import after_absence
from services.contracts.topics.attributions import Attribution
from services.contracts.topics.interactions import INTERACTIONS, Interaction
from services.encoder.domain import Vocabulary
from services.offline.backfill.bulk_import import BulkImport
from services.offline.backfill.memory_store import MemoryStore
from services.offline.backfill.reattribution import Reattribution

PARTITIONS = 3
START_MS, FLOOR_MS = 10**11, 1_024_000


def rows(seed: int) -> AbsenceRows:
    components = np.random.default_rng(seed).normal(0, 100, size=(18, 1, 4)).astype(np.float32)
    components[0] = 0
    return AbsenceRows(floor_seconds=1024, components=components, gate=None)


AWAY = replace(VOCABULARY, absence=rows(1))
# About the edges of buckets.
GAPS_MS = st.sampled_from(
    [0, 1_000, FLOOR_MS - 1, FLOOR_MS, 2 * FLOOR_MS - 1, 2 * FLOOR_MS, 4 * FLOOR_MS, 10**9, 10**10]
)


@st.composite
def streams(draw: st.DrawFn) -> list[Interaction]:
    """Few people's events, mostly in their order, some late, some taken back, some of kinds that histories keep out."""
    times, events = dict.fromkeys(range(3), START_MS), []
    for number in range(draw(st.integers(1, 40))):
        user = draw(st.integers(0, 2))
        kind = draw(st.sampled_from(["click"] * 6 + ["undo", "late", "dislike", "impression"]))
        name = f"e{number}"
        if kind == "undo":
            undone = f"e{draw(st.integers(0, 40))}"
            events.append(interaction(user, item_id="", event_id=name, undoes_event_id=undone))
            continue
        gap_ms = draw(GAPS_MS)
        if kind == "late":
            time_ms, kind = times[user] - gap_ms, "click"
        else:
            times[user] = time_ms = times[user] + gap_ms
        item = draw(st.integers(45, 52))
        events.append(interaction(user, item, event_id=name, event_time_ms=max(1, time_ms), type=kind))
    return events


def filled(events: Sequence[Interaction]) -> MemoryStream:
    stream = MemoryStream(PARTITIONS)
    for event in events:
        append(stream, event, int(event.user_id[-1]) % PARTITIONS)
    return stream


def by_place(outbox: MemoryOutbox, model_version: str = "model-1") -> dict[tuple[int, int], Attribution]:
    """What a reader that knows records by their source position keeps; each time they came they were the same."""
    found: dict[tuple[int, int], Attribution] = {}
    for one in outbox.attributions:
        if isinstance(one, Attribution) and one.state.model_version == model_version:
            assert found.setdefault((one.partition, one.offset), one) == one
    return found


def applied(
    events: Sequence[Interaction], vocabulary: Vocabulary = AWAY, sizes: Sequence[int] = (1,), plan: Sequence[str] = ()
) -> dict[tuple[int, int], Attribution]:
    """The attributions of a stream that was applied in batches of these sizes, by processes that died as planned."""
    stream, store, outbox, left = filled(events), MemoryStore(), MemoryOutbox(), list(plan)
    for _ in range(len(plan) + 1):
        try:
            drain(handler_on(store, outbox, vocabulary, lambda _: left.pop() if left else "no"), stream, sizes)
            break
        except Crash:
            continue
    return by_place(outbox)


def test_an_attribution_is_as_of_its_interaction() -> None:
    gaps_ms = [0, FLOOR_MS - 1, FLOOR_MS, 2 * FLOOR_MS - 1, 2 * FLOOR_MS, 10**12, 5_000]
    times_ms = (START_MS + np.cumsum(gaps_ms)).tolist()
    events = [interaction(0, at, event_id=f"e{at}", event_time_ms=time_ms) for at, time_ms in enumerate(times_ms)]
    plain, found = applied(events, VOCABULARY), applied(events)
    buckets = []
    for (place, of_model), before_ms, at_ms in zip(plain.items(), times_ms[:-1], times_ms[1:], strict=True):
        wanted, bucket = after_absence(of_model.state, AWAY.absence, before_ms, at_ms)
        assert found[place] == replace(of_model, state=wanted)
        assert (wanted == of_model.state) == (bucket == 0)
        buckets.append(bucket)
    assert buckets == [0, 1, 1, 2, 17, 0]


def test_stored_states_are_of_no_absence() -> None:
    events = [interaction(0, at, event_id=f"e{at}", event_time_ms=START_MS + at * 10**9) for at in range(5)]
    states = []
    for vocabulary in (VOCABULARY, AWAY):
        store = MemoryStore()
        drain(handler_on(store, MemoryOutbox(), vocabulary), filled(events))
        states.append({key: state.query_state for key, state in store.states.items()})
    assert states[0] == states[1] != {}


fates = st.lists(st.sampled_from(["no"] * 6 + ["before", "after", "partly"]), max_size=40)


@settings(max_examples=150, deadline=None)
@given(streams(), fates, st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_batches_and_kills_change_no_bit_of_an_attribution(
    events: list[Interaction], plan: list[str], sizes: list[int]
) -> None:
    assert applied(events, sizes=sizes, plan=plan) == applied(events)


@settings(max_examples=60, deadline=None)
@given(streams())
def test_reading_the_log_again_gives_the_same_attributions(events: list[Interaction]) -> None:
    stream, outbox = filled(events), MemoryOutbox()

    def one_partition(partition: int) -> MemoryStream:
        reader = stream.reader(partitions=[partition])
        reader.committed_to = {INTERACTIONS: {}}
        return reader

    Reattribution(
        open_stream=one_partition,
        partitions=range(PARTITIONS),
        outbox=outbox,
        forgets=MemoryForgetLog(),
        encoder=HashEncoder(),
        vocabulary=AWAY,
        pseudonym_key=b"key",
        new_store=lambda: MemoryStore(max_seen=0),
    ).run()
    assert by_place(outbox) == applied(events, sizes=(7,))


@pytest.mark.parametrize("spread_s", [1, 900, 10**6])
def test_an_import_gives_the_attributions_of_the_stream(spread_s: int) -> None:
    data = past()
    data = replace(data, timestamps=1_000 + (data.timestamps - 1_000) * spread_s)
    stream, outbox = MemoryStream(PARTITIONS), MemoryOutbox()
    BulkImport(
        stream=stream,
        writer=MemoryWriter(stream),
        outbox=outbox,
        store=MemoryStore(),
        forgets=MemoryForgetLog(),
        encoder=HashEncoder(),
        vocabulary=AWAY,
        pseudonym_key=b"key",
        attributes=True,
        settle_seconds=0.0,
    ).run(data)
    copy, streamed = MemoryStream(PARTITIONS), MemoryOutbox()
    copy.log = stream.log
    drain(handler_on(MemoryStore(), streamed, AWAY), copy, (37,))
    imported, live = (
        {place: replace(one, recorded_ms=0) for place, one in by_place(one).items()} for one in (outbox, streamed)
    )
    assert imported == live != {}
