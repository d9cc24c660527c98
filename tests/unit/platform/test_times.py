"""Times outside Protobuf's limits are refused where they are read, whoever reads: what writes them on would break."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from freshet.v1 import common_pb2, events_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from services.contracts.topics.forgets import decode_forget
from services.contracts.topics.index_deltas import IndexDelta, ItemDelta, decode, encode
from services.contracts.topics.interactions import decode_interaction
from services.contracts.topics.search_clicks import decode_click
from services.platform.errors import InvalidRequest
from services.platform.stream.records import MOST_MS, read_ms

POSITION = common_pb2.StreamPosition(partition=0, offset=1)
BAD = {
    "seconds": Timestamp(seconds=253_402_300_800),
    "far": Timestamp(seconds=2**62),
    "long ago": Timestamp(seconds=-62_135_596_801),
    "nanos": Timestamp(nanos=1_000_000_000),
    "negative nanos": Timestamp(nanos=-1),
}


def delta(stamp: Timestamp) -> object:
    one = IndexDelta(
        model_version="m",
        partition=0,
        offset=1,
        batch=1,
        last_of_batch=True,
        change=ItemDelta(item_id="a", components=np.full((1, 2), 0.5, np.float32)),
    )
    message = events_pb2.IndexDelta.FromString(encode(one))
    message.newest_recorded_time.CopyFrom(stamp)
    return decode(one.key, message.SerializeToString())


def forget(stamp: Timestamp) -> object:
    message = events_pb2.Forget(forget_id="f", user_id="u", up_to=[POSITION], requested_time=stamp)
    return decode_forget(b"u", message.SerializeToString())


def click(stamp: Timestamp) -> object:
    message = events_pb2.SearchClick(
        event_id="e", item_id="a", query="q", user_pseudonym="p", source=POSITION, recorded_time=stamp
    )
    return decode_click(message.SerializeToString())


def interaction(stamp: Timestamp) -> object:
    message = events_pb2.Interaction(user_id="u", item_id="a", event_time=stamp)
    return decode_interaction(message.SerializeToString(), (), b"u")


@pytest.mark.parametrize("stamp", BAD.values(), ids=BAD)
@pytest.mark.parametrize("read", [delta, forget, click, interaction])
def test_a_time_that_no_calendar_has_is_refused_by_its_field(read: Callable[[Any], object], stamp: Timestamp) -> None:
    with pytest.raises(InvalidRequest, match=r"_time\.(seconds|nanos)=.* allowed: "):
        read(stamp)


def test_all_that_protobuf_allows_is_read() -> None:
    for stamp in (Timestamp(seconds=253_402_300_799, nanos=999_999_999), Timestamp(seconds=-62_135_596_800)):
        ms = read_ms(stamp, "t")
        again = Timestamp()
        again.FromMilliseconds(ms)
        assert again.seconds == stamp.seconds
    assert MOST_MS == 253_402_300_799_999
