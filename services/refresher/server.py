"""RefresherService over gRPC. Handlers run in a thread and lock the registry."""

import asyncio
from dataclasses import asdict
from typing import Any

from freshet.v1 import refresher_pb2, refresher_pb2_grpc

from services.platform.stream.records import set_ms, write_up_to
from services.platform.validation import validate_id
from services.refresher.handlers.describe import Describe, PartitionStatus

SERVICE = refresher_pb2.DESCRIPTOR.services_by_name["RefresherService"].full_name


class RefresherServicer(refresher_pb2_grpc.RefresherServiceServicer):
    def __init__(self, describe: Describe) -> None:
        self._describe = describe

    async def GetStatus(self, request: refresher_pb2.GetStatusRequest, context: Any) -> refresher_pb2.GetStatusResponse:
        status = await asyncio.to_thread(self._describe.status)
        return refresher_pb2.GetStatusResponse(
            model_version=status.model_version,
            policy=status.policy,
            partitions=map(_partition, status.partitions),
            bytes_per_item=status.bytes_per_item,
            bytes_per_remembered=status.bytes_per_remembered,
        )

    async def DescribeItem(
        self, request: refresher_pb2.DescribeItemRequest, context: Any
    ) -> refresher_pb2.DescribeItemResponse:
        validate_id("item_id", request.item_id)
        found = await asyncio.to_thread(self._describe.item, request.item_id)
        return refresher_pb2.DescribeItemResponse(**asdict(found))

    async def DescribeContributions(
        self, request: refresher_pb2.DescribeContributionsRequest, context: Any
    ) -> refresher_pb2.DescribeContributionsResponse:
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
    fields = asdict(status)
    newest_ms = fields.pop("newest_recorded_ms")
    message = refresher_pb2.RefreshedPartition(**fields)
    if newest_ms is not None:
        set_ms(message.newest_recorded_time, newest_ms)
    return message
