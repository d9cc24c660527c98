"""RefresherService: the gRPC edge. Protobuf stops here; reading what is held happens in a thread, under its lock."""

import asyncio
from typing import Any

from freshet.v1 import refresher_pb2, refresher_pb2_grpc
from google.protobuf.timestamp_pb2 import Timestamp

from services.common.stream.position import write_up_to
from services.common.stream.times import set_ms
from services.common.validation import validate_id
from services.refresher.handlers.describe import Describe, PartitionStatus

SERVICE = refresher_pb2.DESCRIPTOR.services_by_name["RefresherService"].full_name


class RefresherServicer(refresher_pb2_grpc.RefresherServiceServicer):
    """Translates messages and calls the handler."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe

    async def GetStatus(self, request: refresher_pb2.GetStatusRequest, context: Any) -> refresher_pb2.GetStatusResponse:
        """What is folded, how far, with digests."""
        status = await asyncio.to_thread(self._describe.status)
        return refresher_pb2.GetStatusResponse(
            model_version=status.model_version,
            policy=status.policy,
            partitions=[_partition(one) for one in status.partitions],
            bytes_per_item=status.bytes_per_item,
            bytes_per_remembered=status.bytes_per_remembered,
        )

    async def DescribeItem(
        self, request: refresher_pb2.DescribeItemRequest, context: Any
    ) -> refresher_pb2.DescribeItemResponse:
        """The evidence behind one item."""
        validate_id("item_id", request.item_id)
        found = await asyncio.to_thread(self._describe.item, request.item_id)
        return refresher_pb2.DescribeItemResponse(
            found=found.found,
            num_interactions=found.num_interactions,
            num_users=found.num_users,
            evidence=found.evidence,
            coherence=found.coherence,
            age_seconds=found.age_seconds,
            model_share=found.model_share,
            is_published=found.is_published,
            reason=found.reason,
        )

    async def DescribeContributions(
        self, request: refresher_pb2.DescribeContributionsRequest, context: Any
    ) -> refresher_pb2.DescribeContributionsResponse:
        """What a user contributed here."""
        validate_id("user_pseudonym", request.user_pseudonym)
        found = await asyncio.to_thread(self._describe.user, request.user_pseudonym)
        response = refresher_pb2.DescribeContributionsResponse(
            interactions=found.interactions,
            items=found.items,
            remembered=found.remembered,
            partitions=found.partitions,
        )
        write_up_to(response.forgotten_up_to, found.forgotten_up_to)
        return response


def _partition(status: PartitionStatus) -> refresher_pb2.RefreshedPartition:
    newest = None
    if status.newest_recorded_ms is not None:
        newest = Timestamp()
        set_ms(newest, status.newest_recorded_ms)
    return refresher_pb2.RefreshedPartition(
        partition=status.partition,
        folded_offset=status.folded_offset,
        end_offset=status.end_offset,
        checkpoint_offset=status.checkpoint_offset,
        newest_recorded_time=newest,
        digest=status.digest,
        num_items=status.num_items,
        num_remembered=status.num_remembered,
        counts=status.counts,
        other_models=status.other_models,
    )
