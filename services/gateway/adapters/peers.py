"""Connect to the processes of a version set, and call encoder, generator and refreshers. A port method is one RPC."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import structlog
from freshet.v1 import (
    encoder_pb2,
    encoder_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    refresher_pb2,
    refresher_pb2_grpc,
)

from services.algorithms.rules.filters import ItemFilter
from services.contracts.processes import PROCESSES
from services.contracts.shards import Shard
from services.contracts.topics.version_sets import VersionSet
from services.contracts.wire import filter_message, query_state_of
from services.gateway.adapters.processes import Peer, Remote
from services.gateway.config import GatewaySettings, shard_addresses
from services.gateway.domain import Encoded, Event, Hit, SourceHits
from services.gateway.ports import Contributions, ItemProgress, PartitionProgress, StoredUser
from services.platform.errors import FreshetError, PreconditionFailed
from services.platform.request_context import Tracing
from services.platform.rpc import client as rpc_client
from services.platform.stream.records import set_ms

log = structlog.get_logger()

# The generated stubs carry no types.
_EncoderStub: Any = encoder_pb2_grpc.EncoderServiceStub
_GeneratorStub: Any = generator_pb2_grpc.GeneratorServiceStub
_RefresherStub: Any = refresher_pb2_grpc.RefresherServiceStub


class Peers:
    """Connections to a version set's processes. Addresses that the set lacks come from the gateway's settings.

    near: peers inside this process, by process name.
    """

    def __init__(
        self, one: VersionSet, settings: GatewaySettings, tracing: Tracing, model_version: str, near: Mapping[str, Peer]
    ) -> None:
        channel = partial(rpc_client.channel, interceptors=tracing.client_interceptors, tls=settings.tls)
        # `ProbedParts` checks these channels, which also reach replicas that are not ready.
        self.checked: dict[str, list[tuple[str, grpc.aio.Channel, str]]] = defaultdict(list)

        def replicas(process: str, address: str, shard: str = "") -> Remote:
            row = PROCESSES[process]
            health = row.health_of(model_version, shard)
            connected = channel(address, shares=False, service=row.health_service, health=health)
            self.checked[process].append((address, channel(address), health))
            return Remote(connected, of=f" of model {model_version}")

        addresses = shard_addresses(one.candidates or settings.candidates_address)
        shards = [str(Shard(number, len(addresses))) for number in range(len(addresses))]
        self.candidates = (
            [near["candidates"]]
            if "candidates" in near
            else [replicas("candidates", address, shard) for address, shard in zip(addresses, shards, strict=True)]
        )
        self.reranker = near.get("reranker") or replicas("reranker", one.reranker or settings.reranker_address)
        self.encoder = replicas("encoder", settings.encoder_address)
        generator = one.generator or settings.generator_address
        self.generator = Remote(asked := channel(generator))
        self.checked["generator"] = [(generator, asked, "")]
        self.refreshers = {address: channel(address) for address in one.refreshers or settings.refreshers}
        self.checked["refresher"] = [(address, asked, "") for address, asked in self.refreshers.items()]

    async def close(self) -> None:
        for one in (*self.candidates, self.reranker, self.encoder):
            await one.close()
        for of_part in self.checked.values():
            for _, asked, _ in of_part:
                await asked.close()


class RemoteEncoder:
    """Implements `ports.Encoder`."""

    def __init__(self, peer: Peer, model_version: str) -> None:
        self._peer, self._model_version = peer, model_version

    async def encode(self, user_id: str, history: Sequence[Event], timeout_s: float) -> Encoded:
        """Call Encode. Raises: PreconditionFailed if another model answers."""
        request = encoder_pb2.EncodeRequest(user_id=user_id, model_version=self._model_version)
        for event in history:
            message = request.history.add(item_id=event.item_id, type=event.type, value=event.value)
            set_ms(message.event_time, event.event_time_ms or 0)
        response = await self._peer.call(_EncoderStub, "Encode", request, timeout_s=timeout_s, peer="encoder")
        state = query_state_of(response.query_state) if response.HasField("query_state") else None
        if state is not None and state.model_version != self._model_version:
            raise PreconditionFailed(
                f"encoder: it encodes for model {state.model_version!r}; this gateway serves {self._model_version!r}"
            )
        return Encoded(query_state=state, queue_ms=response.queue_ms, encode_ms=response.encode_ms)

    async def describe_user(self, user_id: str, timeout_s: float) -> StoredUser:
        request = encoder_pb2.DescribeUserRequest(user_id=user_id)
        response = await self._peer.call(_EncoderStub, "DescribeUser", request, timeout_s=timeout_s, peer="encoder")
        return StoredUser(
            pseudonym=response.user_pseudonym,
            history_events=response.history_events,
            seen_items=response.seen_items,
            in_model=response.in_model,
            query_states=len(response.state_model_versions),
            forgotten_up_to=offsets_of(response.forgotten_up_to),
        )


class RemoteTextSources:
    """Implements `ports.TextSources`: one RPC for all sources."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def find(
        self, sources: Sequence[str], query: str, *, k: int, filter: ItemFilter, timeout_s: float
    ) -> Mapping[str, SourceHits | FreshetError]:
        request = generator_pb2.FindByWordsRequest(query=query, k=k, filter=filter_message(filter), sources=sources)
        request.filter.ClearField("exclude_seen")  # sources have no data of users
        call = self._peer.call
        response = await call(_GeneratorStub, "FindByWords", request, timeout_s=timeout_s, peer="generator")
        return {answer.source: _to_hits(answer, response.text_version) for answer in response.answers}


def _to_hits(answer: Any, text_version: str) -> SourceHits | FreshetError:
    if answer.status:
        return rpc_client.translate_status(answer.status, answer.reason, "generator")
    items = [Hit(item.item_id, item.score, item.identifier) for item in answer.items]
    return SourceHits(items=items, text_version=text_version, milliseconds=answer.milliseconds)


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


def offsets_of(positions: Any) -> dict[int, int]:
    return {position.partition: position.offset for position in positions}
