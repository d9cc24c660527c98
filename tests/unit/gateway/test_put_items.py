"""Items are written whole and once each, or refused before anything is written."""

import pytest
from freshet.v1 import events_pb2, gateway_pb2
from gateway_scene import Scene
from test_server import gateway

from services.contracts.topics.items import CatalogueItem
from services.gateway.write.items import MAX_ITEMS
from services.platform.errors import DependencyUnavailable, InvalidRequest


async def test_items_cross_the_wire_with_all_that_they_say(scene: Scene) -> None:
    request = gateway_pb2.PutItemsRequest(
        items=[
            events_pb2.Item(item_id="new", title="Größe", categories=["a", "b"]),
            events_pb2.Item(item_id="off", available=False),
            events_pb2.Item(item_id="gone", withdrawn=True),
            events_pb2.Item(item_id="dear", attributes={"price": {"number": 99}, "maker": {"tag": "7"}}),
        ]
    )
    async with gateway(scene) as stub:
        answer = await stub.PutItems(request, timeout=5)
    assert answer.num_written == 4
    assert scene.items.written == [
        CatalogueItem(item_id="new", title="Größe", categories=("a", "b")),
        CatalogueItem(item_id="off", available=False),
        CatalogueItem(item_id="gone", withdrawn=True),
        CatalogueItem(item_id="dear", attributes={"price": 99.0, "maker": "7"}),
    ]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([], f"items='0 items' allowed: 1-{MAX_ITEMS}"),
        ([CatalogueItem(item_id=str(n)) for n in range(MAX_ITEMS + 1)], "items='1001 items' allowed: 1-1000"),
        (
            [CatalogueItem(item_id="a"), CatalogueItem(item_id="")],
            r"items\[1\]\.item_id='text of 0 bytes'",
        ),
        ([CatalogueItem(item_id="a", title="x" * 513)], r"items\[0\]\.title='text of 513 bytes' allowed: 0-512"),
        (
            [CatalogueItem(item_id="a", categories=("c",) * 65)],
            r"items\[0\]\.categories='65 of them'",
        ),
        (
            [CatalogueItem(item_id="a", attributes={"colour": "red"})],
            r"items\[0\]\.attributes='colour' allowed: price \(number\), maker \(tag\)",
        ),
        (
            [CatalogueItem(item_id="a", attributes={"price": "9"})],
            r"items\[0\]\.attributes\['price'\]=\"a tag \('9'\)\" allowed: a number",
        ),
        ([CatalogueItem(item_id="a")] * 2, r"items\[1\]\.item_id='that of items\[0\]' allowed: each item once"),
    ],
    ids=["none", "too many", "no id", "long title", "many categories", "undeclared", "another kind", "twice"],
)
async def test_a_bad_item_refuses_the_request_before_anything_is_written(
    items: list[CatalogueItem], says: str, scene: Scene
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await scene.put_items(items)
    assert scene.items.written == []


async def test_an_unacknowledged_item_is_said_with_how_many_were_written(scene: Scene) -> None:
    scene.items.refused = {"b"}
    with pytest.raises(DependencyUnavailable, match="2 of 3 items were acknowledged, send all again") as caught:
        await scene.put_items([CatalogueItem(item_id=name) for name in "abc"])
    assert caught.value.retry_after_ms == 500
