"""Convert GetItem's and ListItems' messages."""

from collections.abc import Sequence
from dataclasses import asdict

from freshet.v1 import events_pb2, gateway_pb2

from services.contracts.attributes import set_value
from services.gateway.describe.items import ItemReport, ItemsQuery
from services.gateway.recommend.popular import KnownItem
from services.platform.stream.records import set_ms


def items_query(request: gateway_pb2.ListItemsRequest) -> ItemsQuery:
    return ItemsQuery(
        prefix=request.prefix,
        category=request.category,
        newest_first=request.newest_first,
        page_size=request.page_size,
        page_token=request.page_token,
    )


def _known_message(known: KnownItem) -> gateway_pb2.DescribedItem:
    item = known.item
    message = gateway_pb2.DescribedItem(
        item=events_pb2.Item(
            item_id=item.item_id,
            title=item.title,
            categories=item.categories,
            available=item.available,
            withdrawn=item.withdrawn,
        ),
        is_trained=known.is_trained,
    )
    for name, value in item.attributes.items():
        set_value(message.item.attributes[name], value)
    if known.first_seen_ms is not None:
        set_ms(message.first_seen, known.first_seen_ms)
    return message


def item_message(found: ItemReport) -> gateway_pb2.GetItemResponse:
    progress = None if found.progress is None else gateway_pb2.ItemProgress(**asdict(found.progress))
    return gateway_pb2.GetItemResponse(
        item=_known_message(found.known), progress=progress, model_version=found.model_version
    )


def items_message(items: Sequence[KnownItem], token: str) -> gateway_pb2.ListItemsResponse:
    return gateway_pb2.ListItemsResponse(items=map(_known_message, items), next_page_token=token)
