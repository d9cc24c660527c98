"""Past interactions leave topic and store as if they had been streamed one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from streams import NOW_MS, VOCABULARY, append, drain, handler_on, interaction

from services.contracts.topics.attributions import Attribution
from services.contracts.topics.forgets import Forget
from services.encoder.domain import EncodedStates, EncodeJob
from services.offline.backfill import bulk_import
from services.offline.backfill.bulk_import import BulkImport, ImportReport
from services.offline.backfill.memory_store import MemoryStore
from services.offline.backfill.past_interactions import lay_out
from services.offline.backfill.past_log import write_past
from services.offline.datasets import Interactions
from services.platform.errors import DependencyUnavailable, InvalidRequest, PreconditionFailed
from services.platform.stream.kafka import Record, partition_for
from services.user_state.forgetting import Forgotten
from services.user_state.merging import RECENT_IDS

PARTITIONS = 3


class MemoryWriter:
    """Appends to a memory stream; may die after some records."""

    def __init__(self, stream: MemoryStream, dies_after: int | None = None) -> None:
        self._stream = stream
        self._left = dies_after

    def send_many(self, records: Sequence[Record], timeout_s: float = 1.0) -> list[tuple[int, int]]:
        places = []
        for record in records:
            if self._left == 0:
                raise DependencyUnavailable("Kafka went away")
            self._left = None if self._left is None else self._left - 1
            partition = partition_for(record.key, PARTITIONS)
            places.append((partition, self._stream.append(partition, record.key, record.value, NOW_MS)))
        return places


# Each kept in the history, turned down, shown, and unknown.
TYPES = ["rating", "click", "click", "dislike", "impression", "unheard of"]


def past(rows: int = 400, name: str = "past") -> Interactions:
    random = np.random.default_rng(5)
    return Interactions(
        name=name,
        users=random.integers(0, 12, rows).astype(np.int32),
        items=random.integers(0, 60, rows).astype(np.int32),
        timestamps=np.sort(random.integers(1_000, 1_200, rows)),
        values=random.random(rows).astype(np.float32),
        types=random.integers(0, len(TYPES), rows).astype(np.int16),
        user_ids=[f"user-{number}" for number in range(12)],
        item_ids=[f"item-{number}" for number in range(60)],
        type_names=TYPES,
        titles=[""] * 60,
        categories=[()] * 60,
        source="",
    )


def run(
    stream: MemoryStream,
    store: MemoryStore,
    data: Interactions,
    dies_after: int | None = None,
    outbox: MemoryOutbox | None = None,
    forgets: MemoryForgetLog | None = None,
    attributes: bool = True,
    encoder: HashEncoder | None = None,
) -> ImportReport:
    return BulkImport(
        stream=stream,
        writer=MemoryWriter(stream, dies_after),
        outbox=outbox or MemoryOutbox(),
        store=store,
        forgets=forgets or MemoryForgetLog(),
        encoder=encoder or HashEncoder(),
        vocabulary=VOCABULARY,
        pseudonym_key=b"key",
        attributes=attributes,
        settle_seconds=0.0,
    ).run(data)


def effect(store: MemoryStore) -> tuple[object, ...]:
    epoch = store.epoch() or ""
    users = store.load_users([f"user-{number}" for number in range(12)], epoch)
    histories = {user: (found.events, found.recent, found.positions) for user, found in users.items()}
    states = {key: (s.query_state, s.partition, s.offset, s.event_time_ms) for key, s in store.states.items()}
    progress = store.progress(range(PARTITIONS), epoch)
    counts = {p: ({n: c for n, c in found.counts.items() if c}, found.watermark) for p, found in progress.items()}
    return histories, store.seen, store.turned_down, states, counts


def streamed(
    stream: MemoryStream, outbox: MemoryOutbox | None = None, forgotten: Forgotten | None = None
) -> MemoryStore:
    """The store after the consumer alone applied what the topic holds."""
    copy, store = MemoryStream(PARTITIONS), MemoryStore()
    copy.log = stream.log
    drain(handler_on(store, outbox or MemoryOutbox(), forgotten=forgotten), copy, (37,))
    return store


def by_place(outbox: MemoryOutbox) -> dict[tuple[int, int], Attribution]:
    """Each attribution by its place, without the broker's time of it, which an import does not know to the ms."""
    found = {}
    for message in outbox.attributions:
        assert isinstance(message, Attribution)
        assert (message.partition, message.offset) not in found
        found[message.partition, message.offset] = replace(message, recorded_ms=0)
    return found


def test_a_finished_import_is_recognised_even_after_live_events() -> None:
    stream, store = MemoryStream(PARTITIONS), MemoryStore()
    run(stream, store, past())
    append(stream, interaction(1, 3, event_id="live"), partition_for(b"user-1", PARTITIONS))
    drain(handler_on(store, MemoryOutbox()), stream)
    before = effect(store)
    report = run(stream, store, past())
    assert (report.written, report.users_filled) == (0, 0)
    assert effect(store) == before


def test_an_import_leaves_and_sends_what_streaming_would_have() -> None:
    stream, store, outbox, wanted = MemoryStream(PARTITIONS), MemoryStore(), MemoryOutbox(), MemoryOutbox()
    report = run(stream, store, past(), outbox=outbox)
    assert (report.written, report.interactions) == (400, 400)
    assert effect(store) == effect(streamed(stream, wanted))
    assert stream.commits == {p: len(log) for p, log in enumerate(stream.log)}
    assert by_place(outbox) == by_place(wanted)
    assert report.attributions == len(outbox.attributions) > 300
    places = [(a.partition, a.offset) for a in outbox.attributions if isinstance(a, Attribution)]
    assert places == sorted(places)


@pytest.mark.parametrize("dies_after", [0, 1, 150, 399])
def test_an_import_that_broke_off_is_continued_and_sends_each_attribution(dies_after: int) -> None:
    stream, store, outbox, wanted = MemoryStream(PARTITIONS), MemoryStore(), MemoryOutbox(), MemoryOutbox()
    with pytest.raises(DependencyUnavailable):
        run(stream, store, past(), dies_after, outbox=outbox)
    assert not store.is_paused()
    assert run(stream, store, past(), outbox=outbox).written == 400 - dies_after
    assert effect(store) == effect(streamed(stream, wanted))
    assert by_place(outbox) == by_place(wanted)


class _BreakingOutbox(MemoryOutbox):
    """Fails at one call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def publish(self, *published: Sequence[Any]) -> None:
        self._left -= 1
        if not self._left:
            raise DependencyUnavailable("Kafka went away")
        super().publish(*published)


def test_an_import_that_broke_off_among_its_users_is_continued_and_counts_each_event_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_import, "FILL_CHUNK", 1)
    stream, store, outbox, wanted = MemoryStream(PARTITIONS), MemoryStore(), _BreakingOutbox(at=6), MemoryOutbox()
    data = past(rows=12 * 2 * RECENT_IDS)
    write_past(data, lay_out(data, PARTITIONS), stream=stream, writer=MemoryWriter(stream), pause=lambda: None)
    forgets, forgotten = MemoryForgetLog(), Forgotten()
    partition = partition_for(b"user-0", PARTITIONS)
    up_to = {partition: len(stream.log[partition]) // 4}
    forget = Forget(forget_id="f", user_id="user-0", up_to=up_to, requested_ms=0)
    forgets.append(forget)
    forgotten.add(forget)
    with pytest.raises(DependencyUnavailable):
        run(stream, store, data, outbox=outbox, forgets=forgets.reader())
    report = run(stream, store, data, outbox=outbox, forgets=forgets.reader())
    assert (report.written, report.users_filled) == (0, 12)
    assert effect(store) == effect(streamed(stream, wanted, forgotten))
    assert by_place(outbox) == by_place(wanted)


def test_what_the_consumer_attributed_before_an_import_overtook_it_is_not_sent_again() -> None:
    stream, store, outbox, wanted = MemoryStream(PARTITIONS), MemoryStore(), MemoryOutbox(), MemoryOutbox()
    with pytest.raises(DependencyUnavailable):
        run(stream, store, past(), dies_after=300)
    handler = handler_on(store, outbox)
    handler.resync(stream)
    handler.apply(stream.poll(0, 111))
    run(stream, store, past(), outbox=outbox)
    assert effect(store) == effect(streamed(stream, wanted))
    assert by_place(outbox) == by_place(wanted)


def test_an_import_after_the_state_store_was_lost_sends_no_attribution_a_second_time() -> None:
    stream, store, outbox = MemoryStream(PARTITIONS), MemoryStore(), MemoryOutbox()
    run(stream, store, past())
    before = effect(store)
    store.wipe()
    assert run(stream, store, past(), outbox=outbox).users_filled == 12
    assert (effect(store), outbox.attributions) == (before, [])


def test_an_import_honours_what_was_forgotten() -> None:
    stream, store = MemoryStream(PARTITIONS), MemoryStore()
    run(stream, store, past())
    forgets, forgotten = MemoryForgetLog(), Forgotten()
    user_ids = {f"user-{number}": partition_for(f"user-{number}".encode(), PARTITIONS) for number in (2, 7)}
    for number, (user_id, partition) in enumerate(user_ids.items()):
        # The one whole, the other up to the middle.
        last = len(stream.log[partition]) // (1 + number) - 1
        wanted_forget = Forget(forget_id=f"f{number}", user_id=user_id, up_to={partition: last}, requested_ms=0)
        forgets.append(wanted_forget)
        forgotten.add(wanted_forget)
    store.wipe()
    stream.commits.clear()
    outbox, wanted = MemoryOutbox(), MemoryOutbox()
    run(stream, store, past(), outbox=outbox, forgets=forgets)
    assert effect(store) == effect(streamed(stream, wanted, forgotten))
    assert by_place(outbox) == by_place(wanted)
    assert store.load_users(["user-2"], store.epoch() or "")["user-2"].events == []


def test_live_events_go_on_behind_an_import() -> None:
    stream, store, outbox = MemoryStream(PARTITIONS), MemoryStore(), MemoryOutbox()
    run(stream, store, past())
    append(stream, interaction(1, 3, event_id="live"), partition_for(b"user-1", PARTITIONS))
    drain(handler_on(store, outbox), stream)
    assert effect(store) == effect(streamed(stream))
    # The import sent its own.
    assert [attribution.event_id for attribution in by_place(outbox).values()] == ["live"]


def test_a_topic_that_begins_with_other_records_is_refused() -> None:
    stream, store = MemoryStream(PARTITIONS), MemoryStore()
    for number in range(12):
        append(stream, interaction(number, 3), partition_for(f"user-{number}".encode(), PARTITIONS))
    with pytest.raises(PreconditionFailed, match="another event"):
        run(stream, store, past())
    assert store.load_users(["user-1"], store.epoch() or "")["user-1"].events == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"values": np.array([1.0, np.nan])}, "values"),
        ({"timestamps": np.array([5, 10**12])}, "event_time"),
        ({"user_ids": ["user-0", ""]}, "user_id"),
        ({"item_ids": ["a\0b", "item-1"]}, "item_id"),
        ({"type_names": ["t" * 65]}, "type"),
    ],
)
def test_what_breaks_a_limit_is_refused_before_anything_is_written(change: dict[str, object], named: str) -> None:
    fields: dict[str, object] = {
        "name": "past",
        "users": np.array([0, 1]),
        "items": np.array([0, 1]),
        "timestamps": np.array([4, 5]),
        "values": np.array([1.0, 2.0]),
        "types": np.array([0, 0]),
        "user_ids": ["user-0", "user-1"],
        "item_ids": ["item-0", "item-1"],
        "type_names": ["rating"],
        "titles": ["", ""],
        "categories": [(), ()],
        "source": "",
    }
    stream = MemoryStream(PARTITIONS)
    with pytest.raises(InvalidRequest, match=named):
        run(stream, MemoryStore(), Interactions(**(fields | change)))  # type: ignore[arg-type]
    assert not any(stream.log)


def test_an_import_goes_on_from_what_was_written_before_there_was_a_model() -> None:
    data, stream, store = past(), MemoryStream(PARTITIONS), MemoryStore()
    layout, writer = lay_out(data, PARTITIONS), MemoryWriter(stream)
    assert write_past(data, layout, stream=stream, writer=writer, pause=lambda: None) == len(data)
    assert run(stream, store, data).written == 0
    assert effect(store) == effect(streamed(stream))


def test_an_import_leaves_the_encoders_cache_to_the_live_stream() -> None:
    keys = set[int | None]()

    class Noting(HashEncoder):
        def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
            keys.update(job.cache_key for job in jobs)
            return super().encode(jobs)

    run(MemoryStream(PARTITIONS), MemoryStore(), past(), encoder=Noting())
    assert keys == {None}
