"""The records of `index-deltas`, and whole batches out of interleaved, broken-off and compacted streams of them."""

import itertools
import tracemalloc

import numpy as np
import pytest
from freshet.v1 import events_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.topics import index_deltas
from services.contracts.topics.index_deltas import (
    MAX_BATCH_RECORDS,
    Batches,
    IndexDelta,
    ItemDelta,
    MemoryDelta,
    decode,
    encode,
    is_of_model,
    item_key,
    joined,
    memory_key,
)
from services.platform.errors import InvalidRequest

MODEL = "0123abcd"


def item(item_id: str = "a/b", value: float = 0.25, **rest: object) -> ItemDelta:
    return ItemDelta(item_id=item_id, components=np.full((2, 3), value, dtype=np.float32), **rest)  # type: ignore[arg-type]


def record(
    change: ItemDelta | MemoryDelta, *, batch: int = 1, last: bool = True, partition: int = 0, offset: int = 0
) -> IndexDelta:
    return IndexDelta(
        model_version=MODEL,
        partition=partition,
        offset=offset,
        batch=batch,
        last_of_batch=last,
        change=change,
        newest_recorded_ms=1_700_000_000_123 + offset,
    )


def memory(entry_id: str) -> MemoryDelta:
    return MemoryDelta(entry_id=entry_id, item_id="a/b", components=np.full((1, 2), 0.5, dtype=np.float32), weight=1.0)


def test_an_item_survives_the_wire_bit_for_bit() -> None:
    gate = np.array([0.1, -2.0, 3e-9, 4.0], dtype=np.float32)
    sent = record(item("ü/1", 1 / 3, gate=gate, model_share=0.625, num_interactions=7), batch=9, partition=3, offset=41)
    got = decode(sent.key, encode(sent))
    assert (got.model_version, got.partition, got.offset, got.batch, got.last_of_batch, got.newest_recorded_ms) == (
        MODEL, 3, 41, 9, True, 1_700_000_000_164,
    )  # fmt: skip
    assert isinstance(got.change, ItemDelta)
    assert isinstance(sent.change, ItemDelta)
    assert got.key == item_key(MODEL, "ü/1") == sent.key
    assert got.change.components.tobytes() == sent.change.components.tobytes()
    assert got.change.gate is not None
    assert got.change.gate.tobytes() == gate.tobytes()
    assert (got.change.model_share, got.change.num_interactions, got.change.dropped) == (0.625, 7, False)


def test_a_remembered_interaction_survives_the_wire() -> None:
    components = np.array([[0.5, -0.25]], dtype=np.float32)
    sent = record(
        MemoryDelta(
            entry_id="2-77",
            item_id="x",
            components=components,
            weight=-1.5,
            type="rating",
            event_time_ms=1_600_000_000_007,
        ),
        last=False,
    )
    got = decode(sent.key, encode(sent)).change
    assert isinstance(got, MemoryDelta)
    assert sent.key == memory_key(MODEL, "2-77")
    np.testing.assert_array_equal(got.components, components)
    assert (got.item_id, got.weight, got.type, got.event_time_ms) == ("x", -1.5, "rating", 1_600_000_000_007)


def test_what_is_dropped_carries_no_arrays() -> None:
    for change in (ItemDelta(item_id="a", dropped=True), MemoryDelta(entry_id="e", item_id="a", dropped=True)):
        sent = record(change)
        got = decode(sent.key, encode(sent)).change
        assert got.dropped
        assert got.components.size == 0


def test_states_of_items_that_are_not_held_are_not_read_and_batches_are_the_same() -> None:
    changes = [
        ItemDelta(item_id=name, components=np.ones((1, 2), np.float32) / 2, gate=np.ones(2, np.float32))
        for name in ("a", "b", "c")
    ]
    changes += [ItemDelta(item_id="a", dropped=True), ItemDelta(item_id="b", dropped=True)]
    sent = [record(change, last=number % 2 == 1) for number, change in enumerate(changes)]
    found = {}
    for held in ("ab", "abc"):
        batches = Batches()
        got = [decode(one.key, encode(one), lambda item_id, held=held: item_id in held) for one in sent]  # type: ignore[misc]
        closed = [batch for offset, one in enumerate(got) for batch in batches.add(offset, one)]
        closed += batches.gone(9, item_key(MODEL, "b")) + batches.gone(10, item_key(MODEL, "c"))
        found[held] = [
            (one.offset, one.mark, [(delta.key, delta.change.dropped) for delta in one.deltas]) for one in closed
        ]
        sizes = [one.change.components.size for one in got]
        assert sizes == [2, 2, 2 if "c" in held else 0, 0, 0]
    assert found["ab"] == found["abc"]


def test_other_models_are_told_from_the_key_alone() -> None:
    assert is_of_model(item_key(MODEL, "a"), MODEL)
    assert not is_of_model(item_key(MODEL + "x", "a"), MODEL)
    assert not is_of_model(None, MODEL)


def broken(change: str) -> tuple[bytes | None, bytes | None]:
    good = record(item("a", gate=np.ones(2, dtype=np.float32)))
    message = events_pb2.IndexDelta.FromString(encode(good))
    key: bytes | None = good.key
    match change:
        case "no bytes":
            return key, None
        case "torn":
            return key, encode(good)[:-3]
        case "no change":
            message.ClearField("change")
        case "no reflects":
            message.ClearField("reflects")
        case "negative reflects":
            message.reflects.offset = -1
        case "short components":
            message.item.components = message.item.components[:-1]
        case "NaN":
            message.item.components = np.full(6, np.nan, dtype="<f4").tobytes()
        case "too long":
            message.item.components = np.array([0, 0, 0, 3e38, 0, 0], dtype="<f4").tobytes()
        case "longer than rounding makes it":
            message.item.components = np.array([1, 0, 0, 0.6, 0.8, 0.06], dtype="<f4").tobytes()
        case "gate beyond half precision":
            message.item.gate = np.array([0, -70_000], dtype="<f4").tobytes()
        case "ragged gate":
            message.item.gate = b"abc"
        case "share":
            message.item.model_share = 1.01
        case "share is NaN":
            message.item.model_share = float("nan")
        case "no components":
            message.item.components, message.item.num_components = b"", 0
        case "no id":
            message.item.item_id = ""
        case "another key":
            key = item_key(MODEL, "b")
        case "no key":
            key = None
    return key, message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("no bytes", "value"), ("torn", "value"), ("no change", "change"), ("no reflects", "reflects"),
        ("negative reflects", "reflects"), ("short components", "components"), ("NaN", "components"),
        ("too long", "components"), ("longer than rounding makes it", "components"),
        ("gate beyond half precision", "gate"), ("ragged gate", "gate"), ("share", "model_share"),
        ("share is NaN", "model_share"),
        ("no components", "components"), ("no id", "item_id"), ("another key", "key"), ("no key", "key"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_refused_with_the_field_named(change: str, names: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{names}="):
        decode(*broken(change))


@pytest.mark.parametrize("weight", [float("inf"), float("nan"), -65_537.0])
def test_memory_of_a_weight_that_no_policy_gives_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^weight="):
        MemoryDelta(entry_id="e", item_id="a", components=np.full((1, 2), 0.5, dtype=np.float32), weight=weight)


def feed(batches: Batches, records: list[tuple[int, IndexDelta]]) -> list[tuple[int, list[bytes]]]:
    closed = [batch for offset, delta in records for batch in batches.add(offset, delta)]
    return [(batch.offset, [delta.key for delta in batch.deltas]) for batch in closed]


def keys(*item_ids: str) -> list[bytes]:
    return [item_key(MODEL, item_id) for item_id in item_ids]


def test_a_batch_comes_whole_with_its_last_record_and_writers_may_interleave() -> None:
    batches = Batches()
    records = [
        (10, record(item("a"), last=False, partition=0)),
        (11, record(item("b"), last=False, partition=1)),
        (12, record(item("c"), partition=0)),
        (15, record(item("d"), partition=1)),
    ]
    assert feed(batches, records) == [(12, keys("a", "c")), (15, keys("b", "d"))]
    assert batches.num_open == 0


def test_a_batch_that_broke_off_is_closed_by_the_next_of_its_writer_alone() -> None:
    batches = Batches()
    assert feed(batches, [(0, record(item("a"), last=False)), (1, record(item("z"), partition=1))]) == [(1, keys("z"))]
    assert batches.num_open == 1
    assert feed(batches, [(2, record(item("b"), batch=2))]) == [(2, keys("a")), (2, keys("b"))]


def test_what_reflects_less_than_what_was_handed_out_is_left_out() -> None:
    batches = Batches()
    first = [(0, record(item("a"), offset=100)), (1, record(item("b"), batch=2, offset=101))]
    late = [
        (2, record(item("a"), batch=3, offset=99, last=False)),
        (3, record(item("c"), batch=3, offset=99, last=False)),
        (4, record(item("b"), batch=3, offset=101)),
    ]
    feed(batches, first)
    assert feed(batches, late) == [(4, keys("c", "b"))]


def test_a_batch_begun_twice_counts_each_key_once_with_its_later_state() -> None:
    batches = Batches()
    again = [record(item("a", 0.1), last=False), record(item("a", 0.2), last=False), record(item("b"))]
    (batch,) = [done for offset, delta in enumerate(again) for done in batches.add(offset, delta)]
    changes = {delta.key: delta.change for delta in batch.deltas}
    assert list(changes) == keys("a", "b")
    assert changes[keys("a")[0]].components[0, 0] == np.float32(0.2)


def test_a_batch_without_an_end_is_closed_at_the_limit() -> None:
    batches = Batches()
    change = item("a")
    for offset in range(MAX_BATCH_RECORDS - 1):
        assert not batches.add(offset, record(change, last=False))
    (batch,) = batches.add(MAX_BATCH_RECORDS, record(item("b"), last=False))
    assert batch.offset == MAX_BATCH_RECORDS
    assert batches.num_open == 0


def test_a_batch_says_the_newest_interaction_that_it_reflects() -> None:
    batches = Batches()
    batches.add(0, record(item("a"), last=False, offset=7))
    (batch,) = batches.add(1, record(item("b"), offset=5))
    assert batch.newest_recorded_ms == 1_700_000_000_130


def test_a_batchs_mark_tells_its_place_from_the_same_place_of_another_log() -> None:
    marks = []
    for batch, value in ((7, 0.1), (7, 0.1), (8, 0.2)):
        (closed,) = Batches().add(3, record(item("a", value), batch=batch))
        marks.append(closed.mark)
    assert marks[0] == marks[1] != marks[2]
    assert joined([closed, *Batches().add(4, record(item("a", 0.1), batch=7))]).mark == marks[0]


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_reader_after_compaction_ends_where_the_live_one_is(data: st.DataObject) -> None:
    """Compaction keeps the last record of each key, and everything behind some offset."""
    log: list[tuple[int, IndexDelta | bytes]] = []
    numbers = {0: itertools.count(), 1: itertools.count()}
    written = {0: 0, 1: 0}
    # Tombstones of what a batch drops come in front of its writer's next batch.
    queues: dict[int, list[IndexDelta | bytes]] = {0: [], 1: []}
    dropped: dict[int, list[bytes]] = {0: [], 1: []}
    for _ in range(data.draw(st.integers(1, 25))):
        writer = data.draw(st.integers(0, 1))
        if not queues[writer]:
            chosen = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
            number = next(numbers[writer])
            queues[writer] += dropped[writer]
            dropped[writer] = []
            for place, name in enumerate(chosen):
                written[writer] += 1
                state = item(f"{writer}{name}", float(written[writer]) / 1_024)
                if data.draw(st.booleans()):
                    state = ItemDelta(item_id=f"{writer}{name}", dropped=True)
                    dropped[writer].append(item_key(MODEL, state.item_id))
                queues[writer].append(
                    record(state, batch=number, last=place == len(chosen) - 1, partition=writer, offset=written[writer])
                )
        log.append((len(log), queues[writer].pop(0)))
    for writer in (0, 1):  # what is open at the end is being written: it ends
        log += [(len(log) + place, delta) for place, delta in enumerate(queues[writer])]
    kept_from = data.draw(st.integers(0, len(log)))
    tombstones_from = data.draw(st.integers(0, kept_from))
    last = {key_of(one): offset for offset, one in log}
    compacted = [(offset, one) for offset, one in log if offset >= kept_from or last[key_of(one)] == offset]
    compacted = [(offset, one) for offset, one in compacted if offset >= tombstones_from or isinstance(one, IndexDelta)]
    assert content(log) == content(compacted)
    # A reader that was away while the topic was compacted.
    away = data.draw(st.integers(0, kept_from))
    if away >= tombstones_from:
        assert content([*log[:away], *(one for one in compacted if one[0] >= away)])[1] == content(log)[1]


def key_of(one: IndexDelta | bytes) -> bytes:
    return one if isinstance(one, bytes) else one.key


def test_a_key_goes_with_its_tombstone_unless_a_record_dropped_it() -> None:
    batches = Batches()
    key = item_key(MODEL, "a/b")
    feed(batches, [(1, record(item("a/b"))), (2, record(MemoryDelta(entry_id="e", dropped=True), batch=2))])
    (batch,) = batches.gone(3, key)
    assert (batch.offset, [delta.key for delta in batch.deltas]) == (3, [key])
    assert batch.deltas[0].change.dropped
    assert batches.gone(4, key) == []
    assert batches.gone(5, memory_key(MODEL, "e")) == []


def test_what_was_dropped_long_ago_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered interaction has an id of its own, so every one is dropped for good some day."""
    monkeypatch.setattr(index_deltas, "MAX_DROPPED_KEYS", 500)
    batches = Batches()

    def come_and_go(numbers: range) -> None:
        for number in numbers:
            for entry in (memory(f"e{number}"), MemoryDelta(entry_id=f"e{number}", dropped=True)):
                batches.add(number, record(entry, batch=number, offset=number))
            batches.gone(number, memory_key(MODEL, f"e{number}"))

    tracemalloc.start()
    try:
        come_and_go(range(1, 2_000))
        before, _ = tracemalloc.get_traced_memory()
        come_and_go(range(2_000, 12_000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 18  # 10,000 keys and their positions are 2 MB
    late = batches.add(1, record(memory("e11900"), batch=7, offset=11_000))
    assert [batch.deltas for batch in late] == [()]  # a writer that does not know yet that it was replaced


def test_joined_batches_end_at_the_last_and_keep_each_keys_last_change() -> None:
    batches = Batches()
    done = [*batches.add(3, record(item("a", 0.1), offset=9)), *batches.add(4, record(item("b"), batch=2, offset=8))]
    done += batches.add(7, record(item("a", 0.2), batch=3, offset=10))
    one = joined(done)
    assert (one.offset, one.newest_recorded_ms) == (7, 1_700_000_000_133)
    assert {delta.key: float(delta.change.components[0, 0]) for delta in one.deltas} == {
        keys("a")[0]: pytest.approx(0.2),
        keys("b")[0]: 0.25,
    }


def content(log: list[tuple[int, IndexDelta | bytes]]) -> tuple[int, dict[bytes, bytes]]:
    """What is served at the end, and its position."""
    batches, held, position = Batches(), {}, -1
    for offset, one in log:
        for batch in batches.gone(offset, one) if isinstance(one, bytes) else batches.add(offset, one):
            position = batch.offset
            for delta in batch.deltas:
                held[delta.key] = delta.change.components.tobytes()
                if delta.change.dropped:
                    del held[delta.key]
    return position, held
