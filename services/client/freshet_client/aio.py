"""The asyncio client. It has `Client`'s methods, which are awaited, and belongs to the event loop of its first call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from freshet.v1 import gateway_pb2_grpc

from freshet_client import answers, calls, described
from freshet_client.channel import Endpoint, Tls
from freshet_client.client import RECONNECT_S, TIMEOUT_S
from freshet_client.errors import FreshetError, Unreachable, of_call
from freshet_client.requests import (
    Filter,
    HistoryEvent,
    Impression,
    Interaction,
    Item,
    NotAgain,
    RecommendOptions,
    Rule,
    SetChange,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from freshet_client.session import AsyncSession

T = TypeVar("T")


class AsyncGrpcTransport:
    """`GrpcTransport` for asyncio. The first call makes the channel, which belongs to one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tls = None if endpoint.tls is None else endpoint.tls.credentials()
        self._channel: Any = None
        self._stub: Any = None

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Send the request and return the answer's message. Raises: FreshetError."""
        deadline = time.monotonic() + timeout_s
        try:
            return await self._send(method, request, timeout_s, timeout_s)
        except Unreachable as error:
            if error.why != "nothing":
                raise
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._channel.channel_ready(), min(RECONNECT_S, deadline - time.monotonic()))
                return await self._send(method, request, deadline - time.monotonic(), timeout_s)
            raise

    async def _send(self, method: str, request: Any, left_s: float, timeout_s: float) -> Any:
        endpoint = self._endpoint
        self._connect()
        try:
            return await getattr(self._stub, method)(request, timeout=left_s, metadata=tuple(endpoint.metadata))
        except grpc.RpcError as error:
            raise of_call(error, target=endpoint.target, timeout_s=timeout_s) from error
        except grpc.aio.UsageError as error:
            raise FreshetError(f"the client of {endpoint.target} is closed") from error

    async def stream(self, method: str, request: Any) -> AsyncGenerator[Any, None]:
        target = self._endpoint.target
        self._connect()
        try:
            call = getattr(self._stub, method)(request, metadata=tuple(self._endpoint.metadata))
        except grpc.aio.UsageError as error:
            raise FreshetError(f"the client of {target} is closed") from error
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise of_call(error, target=target) from error
        finally:
            call.cancel()

    def _connect(self) -> None:
        endpoint = self._endpoint
        if self._channel is None:
            self._channel = (
                grpc.aio.insecure_channel(endpoint.target, options=endpoint.options)
                if self._tls is None
                else grpc.aio.secure_channel(endpoint.target, self._tls, options=endpoint.options)
            )
            self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class AsyncClient:
    """`Client` for asyncio, with the same methods: `async with AsyncClient("127.0.0.1:50050") as client`."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = TIMEOUT_S,
        is_background: bool = False,
    ) -> None:
        endpoint = Endpoint.of(target, api_key=api_key, tls=tls, is_background=is_background)
        self._transport: Any = AsyncGrpcTransport(endpoint)
        self._timeout_s = timeout_s

    @classmethod
    def over(cls, transport: Any, timeout_s: float = TIMEOUT_S) -> Self:
        made = cls.__new__(cls)
        made._transport, made._timeout_s = transport, timeout_s
        return made

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; calls in flight fail."""
        await self._transport.close()

    def session(self, user_id: str = "", *, not_again: NotAgain | None = None) -> AsyncSession:
        from freshet_client.session import AsyncSession

        return AsyncSession(self, user_id, not_again=not_again)

    async def recommend(
        self, user_id: str = "", k: int = 10, *, timeout_s: float | None = None, **options: Unpack[RecommendOptions]
    ) -> answers.Recommendation:
        return await self._run(calls.recommend(user_id, k, options), timeout_s)

    async def search(
        self,
        query: str,
        k: int = 10,
        *,
        user_id: str = "",
        filter: Filter | None = None,
        context: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> answers.SearchAnswer:
        return await self._run(calls.search(query, k, user_id, filter, context), timeout_s)

    async def similar(
        self,
        item_id: str,
        k: int = 10,
        *,
        user_id: str = "",
        filter: Filter | None = None,
        context: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> answers.SimilarAnswer:
        return await self._run(calls.similar(item_id, k, user_id, filter, context), timeout_s)

    async def explain(
        self,
        user_id: str,
        item_id: str,
        *,
        history: Sequence[HistoryEvent] = (),
        max_pairs: int = 0,
        rules: Sequence[Rule] = (),
        timeout_s: float | None = None,
    ) -> answers.Explanation:
        return await self._run(calls.explain(user_id, item_id, history, max_pairs, rules), timeout_s)

    async def record(self, *interactions: Interaction, timeout_s: float | None = None) -> list[answers.Receipt]:
        return await self._run_all(calls.record(interactions), timeout_s)

    async def record_impressions(
        self, user_id: str, exposure_id: str, impressions: Sequence[Impression], *, timeout_s: float | None = None
    ) -> list[answers.Receipt]:
        return await self._run_all(calls.record_impressions(user_id, exposure_id, impressions), timeout_s)

    async def undo(self, user_id: str, event_id: str, *, timeout_s: float | None = None) -> answers.Receipt:
        return await self._run(calls.undo(user_id, event_id), timeout_s)

    async def put_items(
        self, items: Iterable[Item], *, fields: Sequence[str] = (), timeout_s: float | None = None
    ) -> int:
        written = 0
        for one in calls.put_items(list(items), fields):
            written += await self._run(one, timeout_s)
        return written

    async def forget_user(
        self, user_id: str, *, preview: bool = False, timeout_s: float | None = None
    ) -> answers.ForgetReport:
        return await self._run(calls.forget_user(user_id, preview), timeout_s)

    async def freshness(self, *, timeout_s: float | None = None) -> answers.FreshnessReport:
        return await self._run(calls.freshness(), timeout_s)

    async def catalogue(
        self, *, max_categories: int = 0, timeout_s: float | None = None
    ) -> described.CatalogueDescription:
        return await self._run(calls.catalogue(max_categories), timeout_s)

    async def exposures(
        self, user_id: str, *, max_answers: int = 0, timeout_s: float | None = None
    ) -> described.ShownAnswers:
        return await self._run(calls.exposures(user_id, max_answers), timeout_s)

    async def exposure(
        self, user_id: str, exposure_id: str, *, timeout_s: float | None = None
    ) -> described.ShownAnswer:
        return await self._run(calls.exposure(user_id, exposure_id), timeout_s)

    async def health(self, *, minutes: int = 0, timeout_s: float | None = None) -> described.HealthReport:
        return await self._run(calls.health(minutes), timeout_s)

    async def dead_letters(
        self, topic: str = "", *, max_letters: int = 0, timeout_s: float | None = None
    ) -> described.DeadLetterList:
        return await self._run(calls.dead_letters(topic, max_letters), timeout_s)

    async def replay_dead_letter(
        self, topic: str, position: answers.StreamPosition, *, preview: bool = False, timeout_s: float | None = None
    ) -> described.ReplayedLetter:
        return await self._run(calls.replay_dead_letter(topic, position, preview), timeout_s)

    async def get_item(self, item_id: str, *, timeout_s: float | None = None) -> described.ItemReport:
        return await self._run(calls.get_item(item_id), timeout_s)

    async def list_items(
        self,
        prefix: str = "",
        *,
        category: str = "",
        newest_first: bool = False,
        page_size: int = 0,
        page_token: str = "",
        timeout_s: float | None = None,
    ) -> described.ItemPage:
        return await self._run(calls.list_items(prefix, category, newest_first, page_size, page_token), timeout_s)

    async def user(
        self, user_id: str, *, max_events: int = 0, skip_events: int = 0, timeout_s: float | None = None
    ) -> described.UserReport:
        return await self._run(calls.user(user_id, max_events, skip_events), timeout_s)

    async def tail(self) -> AsyncGenerator[described.TailedInteractions, None]:
        one = calls.tail()
        async with aclosing(self._transport.stream(one.method, one.request)) as messages:
            async for message in messages:
                yield one.read(message)

    async def version_sets(self, *, timeout_s: float | None = None) -> described.VersionSets:
        return await self._run(calls.version_sets(), timeout_s)

    async def change_version_set(
        self,
        change: SetChange,
        name: str = "",
        *,
        expected_revision: int,
        share: float = 0.0,
        timeout_s: float | None = None,
    ) -> described.Changed:
        return await self._run(calls.change_version_set(change, name, share, expected_revision), timeout_s)

    async def rules(self, *, timeout_s: float | None = None) -> described.StandingRules:
        return await self._run(calls.rules(), timeout_s)

    async def put_rules(
        self, rules: Sequence[Rule], *, expected_revision: int, timeout_s: float | None = None
    ) -> described.Changed:
        return await self._run(calls.put_rules(rules, expected_revision), timeout_s)

    async def call(self, method: str, request: Any, *, timeout_s: float | None = None) -> Any:
        return await self._transport.call(method, request, self._timeout_s if timeout_s is None else timeout_s)

    async def _run(self, one: calls.Call[T], timeout_s: float | None) -> T:
        return one.read(await self.call(one.method, one.request, timeout_s=timeout_s))

    async def _run_all(
        self, parts: Iterable[calls.Call[list[answers.Receipt]]], timeout_s: float | None
    ) -> list[answers.Receipt]:
        receipts: list[answers.Receipt] = []
        try:
            for one in parts:
                acknowledged = await self._run(one, timeout_s)
                receipts += acknowledged
        except FreshetError as error:
            error.receipts = tuple(receipts)
            raise
        return receipts
