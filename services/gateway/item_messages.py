"""Convert GetItem's and ListItems' messages."""

from collections.abc import Sequence
from dataclasses import asdict, fields

from freshet.v1 import events_pb2
from freshet.v1 import gateway_pb2 as pb

from services.contracts.attributes import set_value
from services.gateway.describe.items import ItemReport, ItemsQuery
from services.gateway.recommend.popular import KnownItem
from services.platform.stream.records import set_ms


def items_query(request: pb.ListItemsRequest) -> ItemsQuery:
    return ItemsQuery(**{one.name: getattr(request, one.name) for one in fields(ItemsQuery)})


def _known_message(known: KnownItem) -> pb.DescribedItem:
    plain = {name: getattr(known.item, name) for name in ("item_id", "title", "categories", "available", "withdrawn")}
    message = pb.DescribedItem(item=events_pb2.Item(**plain), is_trained=known.is_trained)
    for name, value in known.item.attributes.items():
        set_value(message.item.attributes[name], value)
    if known.first_seen_ms is not None:
        set_ms(message.first_seen, known.first_seen_ms)
    return message


def item_message(found: ItemReport) -> pb.GetItemResponse:
    progress = None if found.progress is None else pb.ItemProgress(**asdict(found.progress))
    return pb.GetItemResponse(item=_known_message(found.known), progress=progress, model_version=found.model_version)


def items_message(items: Sequence[KnownItem], token: str) -> pb.ListItemsResponse:
    return pb.ListItemsResponse(items=map(_known_message, items), next_page_token=token)
