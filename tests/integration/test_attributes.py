"""Attributes on the whole stack: every way of asking keeps to them, at once after an item was put."""

import uuid

import pytest
from freshet.v1 import common_pb2, events_pb2, gateway_pb2
from outside import Outside, event, until

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.attributes import condition_message
from services.contracts.conditions import parse_condition
from services.stack import Stack

pytestmark = pytest.mark.integration


def where(*conditions: str, **fields: object) -> common_pb2.Filter:
    return common_pb2.Filter(where=[condition_message(*parse_condition(text)) for text in conditions], **fields)


def test_every_way_of_asking_keeps_to_attributes(stack: Stack) -> None:
    stack.up()
    bundle = load_bundle(stack.bundle)
    rows = [bundle.attributes.of_row(row) for row in range(bundle.num_items)]
    cheap = {
        item_id
        for item_id, one in zip(bundle.item_ids, rows, strict=True)
        if one.get("price", 9) <= 3 and one["language"] == "de"
    }
    conditions = ("price<=3", "language=de")
    user, word = f"ann-{uuid.uuid4().hex[:8]}", f"zeppelin{uuid.uuid4().hex[:6]}"
    with Outside(stack) as outside:
        outside.record(*(event(user, item_id) for item_id in [one for one in bundle.item_ids if one not in cheap][:4]))
        answer = outside.gateway.Recommend(
            gateway_pb2.RecommendRequest(user_id=user, k=10, filter=where(*conditions)), timeout=10
        )
        assert len(answer.items) == min(10, len(cheap))
        assert {item.item_id for item in answer.items} <= cheap
        nobody = gateway_pb2.RecommendRequest(user_id=word, k=10, filter=where(*conditions))
        popular = outside.gateway.Recommend(nobody, timeout=10)
        assert {item.source for item in popular.items} == {"popular"}
        assert {item.item_id for item in popular.items} <= cheap
        near = outside.gateway.Similar(
            gateway_pb2.GatewayServiceSimilarRequest(item_id=bundle.item_ids[0], k=10, filter=where(*conditions)),
            timeout=10,
        )
        assert len(near.items) == min(10, len(cheap - {bundle.item_ids[0]}))
        assert {item.item_id for item in near.items} <= cheap

        dear, new = (
            events_pb2.Item(item_id=f"{kind}-{word}", title=f"The {word}", attributes={"price": {"number": price}})
            for kind, price in (("dear", 1e6), ("new", 2.5))
        )
        outside.gateway.PutItems(gateway_pb2.PutItemsRequest(items=[dear, new]), timeout=10)

        def found(wanted: common_pb2.Filter) -> set[str]:
            request = gateway_pb2.GatewayServiceSearchRequest(query=word, k=10, filter=wanted)
            return {one.item_id for one in outside.gateway.Search(request, timeout=10).results}

        until("both titles are found", lambda: found(where()) >= {dear.item_id, new.item_id}, within_s=60)
        assert dear.item_id not in found(where("price<=3"))
        until("the new one's price counts", lambda: new.item_id in found(where("price<=3")))
        dear.attributes["price"].number = 1
        outside.gateway.PutItems(gateway_pb2.PutItemsRequest(items=[dear]), timeout=10)
        until("the new price counts", lambda: dear.item_id in found(where("price<=3")), within_s=20)
