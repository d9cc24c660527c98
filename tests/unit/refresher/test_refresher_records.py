"""Bytes to records: every limit is checked, nothing raises, clocks that run ahead are held back."""

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from freshet.v1 import common_pb2, events_pb2
from refresher_scene import MODEL, P_Q, P_X, START_MS, D, interaction

from services.contracts.topics.items import CatalogueItem, encode_item
from services.platform.stream.records import DeadLetter, SourceRecord, pack_position, unpack_position
from services.refresher.adapters.topics import QueryShape, decode_attribution, decode_listing
from services.refresher.domain.records import Forgetting, Interaction, Listing, Undo

SHAPE = QueryShape(model_version=MODEL, num_components=P_Q, component_width=D, num_pairs=P_Q * P_X)
Change = Callable[[Any], None]


def message() -> Any:
    one = interaction(np.random.default_rng(1), place=(2, 77), item="item-1", user="ab12")
    found = events_pb2.Attribution(
        event_id="e",
        item_id=one.item_id,
        type="click",
        value=1.0,
        user_pseudonym=one.user,
        source=common_pb2.StreamPosition(partition=2, offset=77),
        query_state=common_pb2.QueryState(
            model_version=MODEL,
            components=one.query.components,
            gate=one.query.gate,
            num_components=P_Q,
            component_width=D,
        ),
    )
    found.event_time.FromMilliseconds(START_MS)
    found.recorded_time.FromMilliseconds(START_MS + 50)
    return found


def decoded(change: Change = lambda m: None) -> Any:
    found = message()
    change(found)
    return decode_attribution(
        SourceRecord("attributions", 3, 9, START_MS + 99, b"item-1", found.SerializeToString()), SHAPE
    )


def test_an_interaction_is_read_whole() -> None:
    one = decoded()
    assert isinstance(one, Interaction)
    assert (one.offset, unpack_position(one.source_position), one.item_id, one.user) == (9, (2, 77), "item-1", "ab12")
    assert (one.type, one.value, one.moment_ms, one.recorded_ms) == ("click", 1.0, START_MS, START_MS + 50)


def test_an_event_time_ahead_of_the_broker_happened_when_the_broker_took_it() -> None:
    one = decoded(lambda m: m.event_time.FromMilliseconds(START_MS + 10**9))
    assert one.moment_ms == START_MS + 50


def test_a_record_without_times_has_its_own() -> None:
    def change(m: Any) -> None:
        m.ClearField("event_time")
        m.ClearField("recorded_time")

    one = decoded(change)
    assert one.moment_ms == one.recorded_ms == START_MS + 99


def test_without_any_time_that_can_be_a_record_is_unreadable() -> None:
    found = message()
    found.ClearField("recorded_time")
    record = SourceRecord("attributions", 3, 9, 2**62, b"item-1", found.SerializeToString())
    dead = decode_attribution(record, SHAPE)
    assert isinstance(dead, DeadLetter)
    assert dead.reason.startswith("recorded_time=")


def test_undo_and_forgetting_are_told_apart() -> None:
    def undo(m: Any) -> None:
        m.undoes.partition, m.undoes.offset = 1, 5

    def forget(m: Any) -> None:
        m.forgets.up_to.add(partition=1, offset=5)
        m.forgets.up_to.add(partition=1, offset=4)
        m.forgets.up_to.add(partition=0, offset=-1)

    assert decoded(undo) == Undo(9, pack_position(1, 5), "item-1", "ab12")
    assert decoded(forget) == Forgetting(9, "ab12", {1: 5, 0: -1})


def test_a_state_of_another_model_may_have_any_shape() -> None:
    def change(m: Any) -> None:
        m.query_state.model_version = "model-b"
        m.query_state.components = b"123"

    assert isinstance(decoded(change), Interaction)


def _bytes_of(value: float, count: int) -> bytes:
    return np.full(count, value, "<f2").tobytes()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("item_id", lambda m: m.ClearField("item_id")),
        ("item_id", lambda m: setattr(m, "item_id", "x" * 129)),
        ("user_pseudonym", lambda m: m.ClearField("user_pseudonym")),
        ("source", lambda m: m.ClearField("source")),
        ("source", lambda m: setattr(m.source, "offset", -1)),
        ("source", lambda m: setattr(m.source, "partition", 1 << 20)),
        ("value", lambda m: setattr(m, "value", float("nan"))),
        ("value", lambda m: setattr(m, "value", float("inf"))),
        ("type", lambda m: setattr(m, "type", "x" * 65)),
        ("query_state.model_version", lambda m: m.ClearField("query_state")),
        ("query_state.components", lambda m: setattr(m.query_state, "num_components", P_Q + 1)),
        ("query_state.components", lambda m: setattr(m.query_state, "components", b"12")),
        ("query_state.components", lambda m: setattr(m.query_state, "components", _bytes_of(np.nan, P_Q * D))),
        ("query_state.components", lambda m: setattr(m.query_state, "components", _bytes_of(1.0, P_Q * D))),
        ("query_state.gate", lambda m: m.query_state.ClearField("gate")),
        ("query_state.gate", lambda m: setattr(m.query_state, "gate", _bytes_of(np.inf, P_Q * P_X))),
        ("undoes", lambda m: setattr(m.undoes, "offset", -3)),
        ("forgets.up_to", lambda m: m.forgets.SetInParent()),
        ("forgets.up_to", lambda m: m.forgets.up_to.add(partition=-1, offset=3)),
    ],
)
def test_what_breaks_a_limit_is_unreadable_and_names_the_field(field: str, change: Change) -> None:
    found = decoded(change)
    assert isinstance(found, DeadLetter)
    assert found.reason.startswith(f"{field}=")
    assert found.offset == 9


@pytest.mark.parametrize("value", [None, b"", b"\xff\xff\xff", pytest.param(secrets.token_bytes(40), id="random")])
def test_bytes_of_nothing_are_unreadable(value: bytes | None) -> None:
    record = SourceRecord("attributions", 0, 1, 0, b"k", value)
    assert decode_attribution(record, SHAPE).offset == 1
    assert isinstance(decode_attribution(record, SHAPE), DeadLetter)
    assert isinstance(decode_listing(record), DeadLetter)


def test_a_listing_is_read() -> None:
    item = CatalogueItem(item_id="a", title="A", categories=("x",), withdrawn=True)
    record = SourceRecord("items", 0, 0, 0, b"a", encode_item(item))
    assert decode_listing(record) == Listing("a", True, "A", ("x",))
