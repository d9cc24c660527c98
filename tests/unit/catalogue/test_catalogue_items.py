"""Item records: what survives the wire, what is refused and why, and the letter that a refused one becomes."""

import math

import pytest
from freshet.v1 import events_pb2

from services.contracts.topics.items import CatalogueItem, decode_item, encode_item, validate_item
from services.platform.errors import InvalidRequest

KINDS = {"price": "number", "released": "time", "maker": "tag"}


def test_an_item_survives_the_wire() -> None:
    for item in (
        CatalogueItem(item_id="ü", title="Größe", categories=("a", "b/c"), available=False),
        CatalogueItem(item_id="1", withdrawn=True),
        CatalogueItem(item_id="1"),
        CatalogueItem(item_id="1", attributes={"price": 7.0, "released": -1, "maker": "7"}),
    ):
        assert decode_item(item.item_id.encode(), encode_item(item), KINDS) == item


def test_attributes_that_the_bundle_does_not_declare_are_left_out() -> None:
    item = CatalogueItem(item_id="1", attributes={"price": 7.0, "colour": "red"})
    assert decode_item(b"1", encode_item(item), KINDS).attributes == {"price": 7.0}
    assert decode_item(b"1", encode_item(item)).attributes == {}


def test_an_item_without_the_field_is_available() -> None:
    item = decode_item(b"1", events_pb2.Item(item_id="1").SerializeToString())
    assert item.is_served
    assert not CatalogueItem(item_id="1", withdrawn=True).is_served
    assert not CatalogueItem(item_id="1", available=False).is_served


@pytest.mark.parametrize(
    ("item", "names"),
    [
        (CatalogueItem(item_id=""), "item_id"),
        (CatalogueItem(item_id="x" * 129), "item_id"),
        (CatalogueItem(item_id="a", title="é" * 257), "title"),
        (CatalogueItem(item_id="a", title="\ud800"), "title"),
        (CatalogueItem(item_id="a", categories=("x",) * 65), "categories"),
        (CatalogueItem(item_id="a", categories=("",)), "categories"),
        (CatalogueItem(item_id="a", categories=("x" * 129,)), "categories"),
        (CatalogueItem(item_id="a", attributes={str(n): 1.0 for n in range(33)}), "attributes"),
        (CatalogueItem(item_id="a", attributes={"price": math.nan}), r"attributes\['price'\]"),
        (CatalogueItem(item_id="a", attributes={"maker": ""}), r"attributes\['maker'\]"),
        (CatalogueItem(item_id="a", attributes={"released": 10**15}), r"attributes\['released'\]"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_with_the_field_named(item: CatalogueItem, names: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{names}="):
        validate_item(item)


def _without_value(item_id: str, name: str) -> bytes:
    message = events_pb2.Item(item_id=item_id)
    message.attributes[name].SetInParent()
    value: bytes = message.SerializeToString()
    return value


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        (b"a", None, "value"),
        (b"a", b"\xff\xff", "value"),
        (b"b", encode_item(CatalogueItem(item_id="a")), "key"),
        (None, encode_item(CatalogueItem(item_id="a")), "key"),
        (b"", encode_item(CatalogueItem(item_id="", title="t")), "item_id"),
        (b"a", encode_item(CatalogueItem(item_id="a", attributes={"price": "7"})), r"attributes\['price'\]"),
        (b"a", encode_item(CatalogueItem(item_id="a", attributes={"maker": 7})), r"attributes\['maker'\]"),
        (b"a", _without_value("a", "price"), r"attributes\['price'\]"),
    ],
)
def test_a_malformed_record_is_refused_with_the_field_named(key: bytes | None, value: bytes | None, names: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{names}="):
        decode_item(key, value, KINDS)
