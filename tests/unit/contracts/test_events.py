"""Records of `interactions` as anybody may write them: each is an interaction within the limits, or refused by name."""

import json
import math
import unicodedata
from typing import Any

import pytest
from freshet.v1 import events_pb2
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.contracts.topics.interactions import (
    MAX_FUTURE_MS,
    Interaction,
    decode_interaction,
    encode_interaction,
    validate,
)
from services.platform.errors import InvalidRequest

NOW_MS = 1_800_000_000_000
JSON = (("content-type", b"application/json"),)
GOOD: dict[str, Any] = {"user_id": "ann", "item_id": "i1", "value": 2.5, "event_time": "2026-01-31T12:00:00Z"}


def read(value: bytes | None, headers: Any = (), key: bytes | None = b"ann") -> Interaction:
    found = decode_interaction(value, headers, key, missing_time_ms=NOW_MS)
    validate(found, NOW_MS)
    return found


def read_json(**changes: Any) -> Interaction:
    return read(json.dumps(GOOD | changes).encode(), JSON)


def refusal(value: bytes | None, headers: Any = (), key: bytes | None = b"ann") -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(value, headers, key)
    return caught.value.message


def test_protobuf_comes_back_as_it_was_written() -> None:
    written = Interaction(
        user_id="ann",
        item_id="i1",
        event_id="e1",
        type="click",
        value=-1.5,
        event_time_ms=NOW_MS - 1,
        context={"surface": "home"},
        exposure_id="shown-1",
    )
    assert read(encode_interaction(written)) == written


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40) | st.text(st.characters(codec="utf-8"), max_size=1_100))
@example("\u2028")
@example("e\u0301" * 341)
@example("\U0001f469\u200d\U0001f680")
def test_any_words_are_refused_by_name_or_kept_to_the_byte(query: str) -> None:
    click = Interaction(user_id="ann", item_id="i1", type="search_click", query=query, event_time_ms=NOW_MS)
    is_blank = not query.strip()
    if is_blank or len(query.encode()) > 1024 or any(unicodedata.category(c) == "Cc" for c in query):
        assert refusal(encode_interaction(click)).startswith("query=")
        return
    found = read(encode_interaction(click))
    assert found.query == read_json(type="search_click", query=query).query == query


@pytest.mark.parametrize(
    ("event_time", "expected_ms"),
    [
        ("2026-01-31T12:00:00Z", 1_769_860_800_000),
        ("2026-01-31T13:00:00.25+01:00", 1_769_860_800_250),
        (1_769_860_800, 1_769_860_800_000),
        (1_769_860_800.5, 1_769_860_800_500),
        (None, NOW_MS),
    ],
)
def test_json_takes_times_as_text_or_seconds_and_a_missing_one_is_the_records_own(
    event_time: Any, expected_ms: int
) -> None:
    assert read_json(event_time=event_time).event_time_ms == expected_ms


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"user_id": ["ann"]}, "user_id='list' allowed: a string"),
        ({"item_id": "x" * 129}, "item_id='text of 129 bytes' allowed: 1-128 bytes"),
        ({"item_id": "a\0b"}, "item_id='text with control characters'"),
        ({"item_id": None}, "item_id='text of 0 bytes'"),
        ({"item_id": 1.5}, "item_id='float' allowed: a string"),
        ({"item_id": "\ud800"}, "item_id='text that is not UTF-8'"),
        ({"event_id": "e" * 129}, "event_id='text of 129 bytes'"),
        ({"exposure_id": "e" * 129}, "exposure_id='text of 129 bytes'"),
        ({"undoes_event_id": "e"}, "item_id='set' allowed: empty when undoes_event_id is set"),
        ({"type": "t" * 65}, "type='text of 65 bytes' allowed: 1-64 bytes"),
        ({"value": math.nan}, "value=nan allowed: a finite number"),
        ({"value": -math.inf}, "value=-inf allowed: a finite number"),
        ({"value": 10**400}, "value='an integer beyond float64' allowed: a finite number"),
        ({"value": "5"}, "value='str' allowed: a finite number"),
        ({"value": True}, "value='bool' allowed: a finite number"),
        ({"event_time": "yesterday"}, "event_time='yesterday' allowed: RFC 3339"),
        ({"event_time": "2026-01-31T12:00:00"}, "event_time='2026-01-31T12:00:00' allowed: RFC 3339"),
        ({"event_time": math.nan}, "event_time='an infinite or immense number'"),
        ({"event_time": 10**400}, "event_time='an infinite or immense number'"),
        ({"event_time": -1}, "event_time='-1000 ms' allowed: 0 to"),
        ({"event_time": NOW_MS / 1000 + 2 * 86_400}, "at most a day in the future"),
        ({"context": {"k": "v" * 257}}, "context='an entry of 257 bytes' allowed: at most 256"),
        ({"context": {f"k{n}": "" for n in range(33)}}, "context='33 entries' allowed: at most 32"),
        ({"context": []}, "context='list' allowed: an object of strings"),
        ({"context": {"k": 1}}, "context='dict' allowed: an object of strings"),
        ({"rating": 5}, "value=\"unknown field 'rating'\" allowed: context, event_id"),
        ({"query": "space"}, "query='set' allowed: empty unless type is 'search_click'"),
        ({"type": "search_click"}, "query='text of 0 bytes' allowed: 1-1024 bytes"),
        ({"type": "search_click", "query": " \u3000 "}, "query='only white space' allowed: words"),
        ({"type": "search_click", "query": "a\tb"}, "query='text with control characters'"),
        ({"type": "search_click", "query": "é" * 513}, "query='text of 1026 bytes' allowed: 1-1024 bytes"),
        ({"type": "search_click", "query": "\ud800"}, "query='text that is not UTF-8'"),
        ({"type": "search_click", "query": ["space"]}, "query='list' allowed: a string"),
        (
            {"type": "search_click", "query": "space", "item_id": None, "undoes_event_id": "e"},
            "query='set' allowed: empty unless",
        ),
    ],
)
def test_a_json_field_out_of_range_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    assert told in refusal(json.dumps(GOOD | changes).encode(), JSON)


@pytest.mark.parametrize(
    ("value", "headers", "key", "told"),
    [
        (None, (), b"ann", "value='no bytes'"),
        (b"", JSON, b"ann", "value='no bytes'"),
        (b'{"user_id": "ann"', JSON, b"ann", "value='17 bytes of broken JSON'"),
        (b"\xff\xfe\xfd", JSON, b"ann", "of broken JSON"),
        (b"[" * 100_000, JSON, b"ann", "of broken JSON"),
        (b"[1]", JSON, b"ann", "value='JSON list' allowed: one JSON object"),
        (b"{}", (("content-type", b"text/csv"),), b"ann", "content-type='text/csv' allowed: application/json"),
        (json.dumps(GOOD).encode(), JSON, b"bob", "key='3 other bytes' allowed: the record's user_id"),
        (json.dumps(GOOD).encode(), JSON, None, "key='absent' allowed: the record's user_id"),
        (json.dumps(GOOD | {"user_id": ""}).encode(), JSON, b"", "user_id='text of 0 bytes' allowed: 1-128 bytes"),
        (json.dumps(GOOD).encode(), (), b"ann", "unreadable bytes"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_name(
    value: bytes | None, headers: Any, key: bytes | None, told: str
) -> None:
    assert told in refusal(value, headers, key)


def test_a_day_in_the_future_is_the_limit() -> None:
    validate(Interaction(user_id="ann", item_id="i1", event_time_ms=NOW_MS + MAX_FUTURE_MS), NOW_MS)
    said = f"event_time='{NOW_MS + MAX_FUTURE_MS + 1} ms' allowed: 0 to {NOW_MS + MAX_FUTURE_MS} ms"
    with pytest.raises(InvalidRequest, match=said):
        validate(Interaction(user_id="ann", item_id="i1", event_time_ms=NOW_MS + MAX_FUTURE_MS + 1), NOW_MS)


# The first draw of a run fills Hypothesis's caches, which takes its time on a busy machine.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
texts = st.text("a0 -:TZ\0\n\x7f\u00e9\ud800\U0001f600", max_size=8)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
fields = st.sampled_from(sorted({*GOOD, "event_id", "type", "context", "undoes_event_id"}))


@unhurried
@given(st.dictionaries(fields, anything), st.none() | st.binary(max_size=4))
@example({"event_time": 10**400}, None)
@example({"event_time": "0001-01-01T00:00:00+23:59"}, None)
@example({"event_time": "9999-12-31T23:59:59-23:59"}, None)
def test_any_json_is_an_interaction_or_an_invalid_request(changes: dict[str, Any], header: bytes | None) -> None:
    try:
        found = read(json.dumps(GOOD | changes).encode(), [*JSON, ("x", header)])
    except InvalidRequest:
        return
    assert read(encode_interaction(found)) == found


@unhurried
@given(st.binary(max_size=64))
def test_any_bytes_are_an_interaction_or_an_invalid_request(tail: bytes) -> None:
    whole = events_pb2.Interaction(user_id="ann", item_id="i1").SerializeToString() + tail
    for value in (tail, whole):
        try:
            found = read(value)
        except InvalidRequest:
            continue
        assert read(encode_interaction(found)) == found
