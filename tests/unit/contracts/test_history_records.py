"""Records of `histories` come back as they were written, and whatever was altered is refused by name."""

import pytest
from freshet.v1 import events_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.stored_history import RecentId, StoredEvent, pack_history
from services.contracts.topics.histories import (
    MARK_KEY,
    MAX_RECORD_BYTES,
    Mark,
    _sealed,
    decode_history,
    decode_mark,
    encode_history,
    encode_mark,
)
from services.platform.errors import InvalidRequest

EVENTS = [StoredEvent(1_800_000_000_000 + n, 3, 40 + n, 2**63 + n, f"item-{n}", "click", 1.0, "s") for n in range(5)]
RECENT = [RecentId(2**64 - 1, 3, 41, 1), RecentId(7, 3, 42, 0, "日本")]
SEEN = {"item-1": 1_800_000_000_000, "日本": 5, "item-2": 1_700_000_000_000}
PACKED = pack_history({3: 44, 0: -1}, {5: 9}, EVENTS, RECENT, SEEN)
MARK = Mark(reading=2**64 - 1, covered=41, num_partitions=8, anchors="1:aa,41:bb", counts={"applied": 42})


def test_a_history_comes_back_whole() -> None:
    found = decode_history(b"ann", encode_history("ann", PACKED, 2**64 - 1))
    assert (found.reading, found.positions, found.forgotten) == (2**64 - 1, {3: 44, 0: -1}, {5: 9})
    assert (found.events, found.recent, found.seen) == (EVENTS, RECENT, SEEN)


def test_a_mark_comes_back() -> None:
    assert decode_mark(encode_mark(MARK)) == MARK
    assert decode_mark(encode_mark(Mark(reading=1, covered=-1, num_partitions=3))).covered == -1


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_byte_that_was_altered_is_noticed(at: int, change: int) -> None:
    for key, value in ((b"ann", encode_history("ann", PACKED, 7)), (MARK_KEY, encode_mark(MARK))):
        place = at % len(value)
        altered = value[:place] + bytes([value[place] ^ change]) + value[place + 1 :]
        with pytest.raises(InvalidRequest, match=r"checksum|value"):
            decode_history(key, altered) if key else decode_mark(altered)


def test_a_newer_format_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"format=2 allowed: 1: a newer version"):
        decode_history(b"ann", _sealed(b"ann", events_pb2.UserHistory(format=2)))


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    message = events_pb2.UserHistory(format=1, events=events_pb2.HistoryEvents(count=2, offset=[1, 2]))
    with pytest.raises(InvalidRequest, match="columns that do not fit"):
        decode_history(b"ann", _sealed(b"ann", message))


def test_a_field_that_a_later_version_adds_is_passed_over() -> None:
    message = events_pb2.UserHistory.FromString(
        events_pb2.UserHistory(format=1, reading=7).SerializeToString() + b"\x72\x01x"  # field 14
    )
    assert decode_history(b"ann", _sealed(b"ann", message)).reading == 7


def test_what_kafka_would_not_take_is_left_to_the_log() -> None:
    seen = {f"{n:0128}": n for n in range(MAX_RECORD_BYTES // 120)}
    assert encode_history("ann", pack_history({}, {}, [], [], seen), 1) == b""


def test_an_event_takes_a_few_bytes() -> None:
    """Twenty events as many users have them: times apart, a number as the item, one type, no exposure."""
    events = [EVENTS[0]._replace(event_time_ms=10**12 + n * 86_400_123, offset=n * 50_000, item_id=str(1000 + n),
                                 exposure_id="") for n in range(20)]  # fmt: skip
    recent = [RecentId(n << 40, 3, n * 50_000, 0, str(1000 + n)) for n in range(20)]
    packed = pack_history({3: 10**6}, {}, events, recent, {event.item_id: event.event_time_ms for event in events})
    assert len(encode_history("ann", packed, 1)) < 20 * 60
