"""The refreshers, over gRPC."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import structlog
from freshet.v1 import refresher_pb2, refresher_pb2_grpc

from services.gateway.adapters.processes import offsets_of
from services.gateway.ports import Contributions, ItemProgress, PartitionProgress
from services.platform.errors import FreshetError
from services.platform.rpc import client as rpc_client

log = structlog.get_logger()

# The generated stubs carry no types.
_RefresherStub: Any = refresher_pb2_grpc.RefresherServiceStub


class RemoteRefreshers:
    """Implements `ports.Refreshers`, one channel per address."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._stubs = {address: _RefresherStub(channel) for address, channel in channels.items()}

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        answers, all_answered = await self._ask_all("GetStatus", refresher_pb2.GetStatusRequest(), timeout_s)
        return [
            PartitionProgress(
                partition=partition.partition, applied_offset=partition.folded_offset, end_offset=partition.end_offset
            )
            for answer in answers
            for partition in answer.partitions
        ], all_answered

    async def contributions(self, pseudonym: str, timeout_s: float) -> tuple[list[Contributions], bool]:
        request = refresher_pb2.DescribeContributionsRequest(user_pseudonym=pseudonym)
        answers, all_answered = await self._ask_all("DescribeContributions", request, timeout_s)
        return [
            Contributions(
                summed_interactions=answer.interactions,
                remembered_interactions=answer.remembered,
                forgotten_up_to=offsets_of(answer.forgotten_up_to),
                partitions=tuple(answer.partitions),
            )
            for answer in answers
        ], all_answered

    async def item(self, item_id: str, timeout_s: float) -> tuple[list[ItemProgress], bool]:
        request = refresher_pb2.DescribeItemRequest(item_id=item_id)
        answers, all_answered = await self._ask_all("DescribeItem", request, timeout_s)
        return [
            ItemProgress(
                num_interactions=answer.num_interactions,
                num_users=answer.num_users,
                min_users=answer.min_users,
                is_published=answer.is_published,
                reason=answer.reason,
            )
            for answer in answers
        ], all_answered

    async def _ask_all(self, method: str, request: Any, timeout_s: float) -> tuple[list[Any], bool]:
        """Call all refreshers concurrently; return the answers, and whether all answered (False without refreshers)."""

        async def ask(address: str, stub: Any) -> Any:
            try:
                return await rpc_client.call(getattr(stub, method), request, timeout_s=timeout_s, peer="refresher")
            except FreshetError as exc:
                log.info("refresher_silent", address=address, error=type(exc).__name__, reason=exc.message)
                return None

        answers = await asyncio.gather(*(ask(address, stub) for address, stub in self._stubs.items()))
        return [answer for answer in answers if answer is not None], bool(answers) and None not in answers
