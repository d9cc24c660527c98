"""RefresherService over gRPC: status with digests, one item's evidence, one user's contributions.

Handlers run in a thread, which locks the registry in slices of about a millisecond.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from freshet.v1 import refresher_pb2, refresher_pb2_grpc

from services.contracts.pseudonyms import PSEUDONYMS_BETWEEN
from services.platform.stream.records import set_ms, write_up_to
from services.platform.validation import validate_id
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.remembered import entry_id_of
from services.refresher.domain.rules import Rules
from services.refresher.handlers.publish import NOTHING, UNKNOWN, Publisher

SERVICE = refresher_pb2.DESCRIPTOR.services_by_name["RefresherService"].full_name
# The pause between slices. A thread that locks again at once would starve the thread that waits.
_PAUSE_S = 0.0001


class Describe:
    """Reads the registry."""

    def __init__(self, registry: PartitionRegistry, publisher: Publisher, rules: Rules) -> None:
        self._registry, self._publisher, self._rules = registry, publisher, rules

    def status(self) -> refresher_pb2.GetStatusResponse:
        """Return every partition with its digest. Only sums that changed since the last call are hashed."""
        partitions = []
        with self._registry.lock:
            numbers = sorted(self._registry.partitions)
        for number in numbers:
            status = self._status_in_slices(number)
            if status is not None:
                partitions.append(status)
        empty = Partition(-1, self._rules, ())
        per_item, per_entry = float(empty.sums.bytes_per_item), float(empty.remembered.memory.bytes_per_entry)
        return refresher_pb2.GetStatusResponse(
            model_version=self._rules.items.model_version,
            policy=f"{self._rules.text} share={self._publisher.weight_policy.text}",
            partitions=partitions,
            bytes_per_item=per_item,
            bytes_per_remembered=per_entry,
        )

    def item(self, item_id: str) -> refresher_pb2.DescribeItemResponse:
        least = self._publisher.min_users
        with self._registry.lock:
            for state in self._registry.partitions.values():
                if item_id in state.sums:
                    return self._evidence(state, item_id)
                if item_id in state.pending:
                    count = len(state.pending.offsets(item_id))
                    return refresher_pb2.DescribeItemResponse(
                        model_share=1.0, found=True, min_users=least, num_interactions=count, reason=UNKNOWN
                    )
        return refresher_pb2.DescribeItemResponse(model_share=1.0, found=False, min_users=least, reason=NOTHING)

    def user(self, pseudonym: str) -> refresher_pb2.DescribeContributionsResponse:
        """Return a user's contributions. `pseudonym` is one or more pseudonyms, joined with `PSEUDONYMS_BETWEEN`."""
        pseudonyms = pseudonym.split(PSEUDONYMS_BETWEEN)
        interactions = remembered = items = 0
        forgotten: list[Mapping[int, int]] = []
        with self._registry.lock:
            states = dict(self._registry.partitions)
        for state in states.values():
            numbers: set[int] = set()
            for name in pseudonyms:
                with self._registry.lock:
                    positions, found = state.ledger.of_user(name)
                    interactions, numbers = interactions + len(positions), numbers | found
                    remembered += sum(entry_id_of(position) in state.remembered.visible for position in positions)
                    # The sums still contain contributions of a user in `leaving`.
                    forgotten.append({} if name in state.leaving else state.ledger.forgotten_up_to(name))
                time.sleep(_PAUSE_S)
            items += len(numbers)
        # By partition of `interactions`, the smallest forgotten offset over all partitions here.
        everywhere = set.intersection(*map(set, forgotten)) if forgotten else set()
        up_to = {partition: min(found[partition] for found in forgotten) for partition in sorted(everywhere)}
        response = refresher_pb2.DescribeContributionsResponse(
            interactions=interactions, items=items, remembered=remembered, partitions=sorted(states)
        )
        write_up_to(response.forgotten_up_to, up_to)
        return response

    def _status_in_slices(self, number: int) -> refresher_pb2.RefreshedPartition | None:
        """Hash changed sums in slices; return the status, or None if the partition was released."""
        while True:
            with self._registry.lock:
                state = self._registry.partitions.get(number)
                if state is None:
                    return None
                if state.sums.hash_some():
                    return self._status_of(state)
            time.sleep(_PAUSE_S)

    def _status_of(self, state: Partition) -> refresher_pb2.RefreshedPartition:
        status = refresher_pb2.RefreshedPartition(
            partition=state.number,
            folded_offset=state.folded_offset,
            end_offset=max(self._registry.ends.get(state.number, 0), state.folded_offset + 1),
            checkpoint_offset=self._registry.checkpoints.get(state.number, -1),
            # While users are subtracted or sums recomputed, the digest cannot be compared with another.
            digest="" if state.leaving or state.returning else state.digest(),
            num_items=len(state.sums),
            num_remembered=len(state.remembered.memory),
            counts=dict(state.counts),
            other_models=dict(state.other_models),
        )
        if state.newest_recorded_ms is not None:
            set_ms(status.newest_recorded_time, state.newest_recorded_ms)
        return status

    def _evidence(self, state: Partition, item_id: str) -> refresher_pb2.DescribeItemResponse:
        sums = state.sums.of([item_id])
        return refresher_pb2.DescribeItemResponse(
            found=True,
            min_users=self._publisher.min_users,
            num_interactions=int(sums.counts[0]),
            num_users=state.num_users(item_id),
            evidence=float(sums.evidence[0]),
            coherence=float(sums.coherence[0]),
            model_share=float(self._publisher.model_weights(state, [item_id])[0]),
            reason=self._publisher.reasons(state, [item_id])[0],
            is_published=item_id in state.outgoing.published,
        )


class RefresherServicer(refresher_pb2_grpc.RefresherServiceServicer):
    def __init__(self, describe: Describe) -> None:
        self._describe = describe

    async def GetStatus(self, request: refresher_pb2.GetStatusRequest, context: Any) -> refresher_pb2.GetStatusResponse:
        return await asyncio.to_thread(self._describe.status)

    async def DescribeItem(
        self, request: refresher_pb2.DescribeItemRequest, context: Any
    ) -> refresher_pb2.DescribeItemResponse:
        validate_id("item_id", request.item_id)
        return await asyncio.to_thread(self._describe.item, request.item_id)

    async def DescribeContributions(
        self, request: refresher_pb2.DescribeContributionsRequest, context: Any
    ) -> refresher_pb2.DescribeContributionsResponse:
        validate_id("user_pseudonym", request.user_pseudonym)
        return await asyncio.to_thread(self._describe.user, request.user_pseudonym)
