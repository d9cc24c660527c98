"""The generator process over gRPC: one RPC for all sources of items by words that are asked at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from freshet.v1 import common_pb2, generator_pb2, generator_pb2_grpc

from services.common import rpc_client
from services.common.errors import FreshetError
from services.gateway.domain import Filter
from services.gateway.searching import Found, FoundItem

# The generated stubs carry no types.
_GeneratorStub: Any = generator_pb2_grpc.GeneratorServiceStub


class RemoteTextSources:
    """Implements `ports.TextSources`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._find_by_words = _GeneratorStub(channel).FindByWords

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: Filter, timeout_s: float
    ) -> Mapping[str, Found | FreshetError]:
        """One call."""
        request = generator_pb2.FindByWordsRequest(
            query=query,
            k=k,
            filter=common_pb2.Filter(
                allow_item_ids=filter.allow_item_ids,
                deny_item_ids=filter.deny_item_ids,
                allow_categories=filter.allow_categories,
                deny_categories=filter.deny_categories,
            ),
            sources=sources,
        )
        response = await rpc_client.call(self._find_by_words, request, timeout_s=timeout_s, peer="generator")
        return {said.source: _said(said, response.text_version) for said in response.answers}


def _said(said: Any, text_version: str) -> Found | FreshetError:
    if said.status:
        return rpc_client.translate_status(said.status, said.reason, "generator")
    items = [FoundItem(item.item_id, item.score, item.identifier) for item in said.items]
    return Found(items=items, text_version=text_version, milliseconds=said.milliseconds)
