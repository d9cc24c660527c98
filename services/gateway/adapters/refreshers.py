"""The refresher processes over gRPC: each is asked what it holds, and may be away."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import structlog
from freshet.v1 import refresher_pb2, refresher_pb2_grpc

from services.common import rpc_client
from services.common.errors import FreshetError
from services.gateway.freshness import PartitionProgress

log = structlog.get_logger()

# The generated stubs carry no types.
_RefresherStub: Any = refresher_pb2_grpc.RefresherServiceStub


class RemoteRefreshers:
    """Implements `ports.Refreshers` over one channel per address."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._status = {address: _RefresherStub(channel).GetStatus for address, channel in channels.items()}

    async def folded(self, timeout_s: float) -> tuple[list[PartitionProgress], bool]:
        """One GetStatus call each, at once."""
        answers = await asyncio.gather(*(self._ask(address, timeout_s) for address in self._status))
        found = [
            PartitionProgress(partition=held.partition, applied_offset=held.folded_offset, end_offset=held.end_offset)
            for answer in answers
            if answer is not None
            for held in answer.partitions
        ]
        return found, bool(answers) and None not in answers

    async def _ask(self, address: str, timeout_s: float) -> Any:
        try:
            return await rpc_client.call(
                self._status[address], refresher_pb2.GetStatusRequest(), timeout_s=timeout_s, peer="refresher"
            )
        except FreshetError as exc:
            log.info("refresher_silent", address=address, error=type(exc).__name__, reason=exc.message)
            return None
