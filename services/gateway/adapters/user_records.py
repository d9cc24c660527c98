"""What the encoder process and the refreshers hold of a user, over gRPC."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import structlog
from freshet.v1 import encoder_pb2, encoder_pb2_grpc, refresher_pb2, refresher_pb2_grpc

from services.common import rpc_client
from services.common.errors import FreshetError
from services.gateway.forgetting import Contributions, StoredUser

log = structlog.get_logger()

# The generated stubs carry no types.
_EncoderStub: Any = encoder_pb2_grpc.EncoderServiceStub
_RefresherStub: Any = refresher_pb2_grpc.RefresherServiceStub


class RemoteUserRecords:
    """Implements `ports.UserRecords`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._describe = _EncoderStub(channel).DescribeUser

    async def describe(self, user_id: str, timeout_s: float) -> StoredUser:
        """One DescribeUser call."""
        request = encoder_pb2.DescribeUserRequest(user_id=user_id)
        found = await rpc_client.call(self._describe, request, timeout_s=timeout_s, peer="encoder")
        return StoredUser(
            pseudonym=found.user_pseudonym,
            history_events=found.history_events,
            seen_items=found.seen_items,
            query_states=len(found.state_model_versions),
            in_model=found.in_model,
            forgotten_up_to=_offsets(found.forgotten_up_to),
        )


class RemoteContributionReaders:
    """Implements `ports.ContributionReaders` over one channel per refresher's address."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._describe = {
            address: _RefresherStub(channel).DescribeContributions for address, channel in channels.items()
        }

    async def of(self, pseudonym: str, timeout_s: float) -> tuple[list[Contributions], bool]:
        """One DescribeContributions call each, at once."""
        answers = await asyncio.gather(*(self._ask(address, pseudonym, timeout_s) for address in self._describe))
        found = [
            Contributions(
                summed_interactions=answer.interactions,
                remembered_interactions=answer.remembered,
                forgotten_up_to=_offsets(answer.forgotten_up_to),
                partitions=tuple(answer.partitions),
            )
            for answer in answers
            if answer is not None
        ]
        return found, bool(answers) and None not in answers

    async def _ask(self, address: str, pseudonym: str, timeout_s: float) -> Any:
        request = refresher_pb2.DescribeContributionsRequest(user_pseudonym=pseudonym)
        try:
            return await rpc_client.call(self._describe[address], request, timeout_s=timeout_s, peer="refresher")
        except FreshetError as exc:
            log.info("refresher_silent", address=address, error=type(exc).__name__, reason=exc.message)
            return None


def _offsets(positions: Any) -> dict[int, int]:
    return {position.partition: position.offset for position in positions}
