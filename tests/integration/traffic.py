"""Bounded traffic for the fault tests: interactions written through the gateway, recommendations asked meanwhile.

A writer reuses its event id until the write is acknowledged, as any client should; a reader asks once and notes what
came back. Both run on a clock, so a dead component does not slow the questions down.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from freshet.v1 import common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc

from services.user_state.reader import StateReader

Degradation = gateway_pb2.Degradation

_TRY_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # The same where the server's clock was first.
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


@dataclass
class Answer:
    """One Recommend as its caller saw it. `at` is seconds of the monotonic clock when it was asked; `is_diverse`
    answers need the reranker; `honoured`: the token, where it was asked with one."""

    at: float
    status: grpc.StatusCode
    is_diverse: bool
    items: int = 0
    degradations: frozenset[int] = frozenset()
    source: str = ""
    honoured: bool = True


@dataclass
class Written:
    """An acknowledged event: what was sent, from when to when on the monotonic clock, and its receipt."""

    event: events_pb2.Interaction
    receipt: gateway_pb2.InteractionReceipt
    began: float
    ended: float


@dataclass
class Traffic:
    """Writes `events_per_s` interactions over `users` in turn and reads `reads_per_s` recommendations, every other one
    diverse. with_tokens: the others ask for the user's newest acknowledged event."""

    target: str
    redis_url: str
    item_ids: list[str]
    prefix: str
    users: int = 24
    events_per_s: float = 40.0
    reads_per_s: float = 20.0
    with_tokens: bool = False
    acknowledged: dict[str, common_pb2.FreshnessToken] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    # When, and with what status.
    refused: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = asyncio.Event()
        self._last_token: dict[str, common_pb2.FreshnessToken] = {}

    @property
    def write_errors(self) -> Counter[str]:
        return Counter(code for _, code in self.refused)

    def user(self, number: int) -> str:
        return f"{self.prefix}-{number % self.users}"

    async def __aenter__(self) -> "Traffic":
        self._channel = grpc.aio.insecure_channel(
            self.target,
            options=[("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)],
        )
        self._gateway = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        self._reader = StateReader(self.redis_url, timeout_s=2.0)
        self._before = await self.counts()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._reader.close()
        await self._channel.close()

    async def counts(self) -> Counter[str]:
        """The stream's counts over all partitions, as the encoder keeps them."""
        _, progress = await self._reader.read_progress()
        total: Counter[str] = Counter()
        for one in progress.values():
            total.update(one.counts)
        return total

    async def stop_writing(self) -> None:
        """No new events; returns when every started one is acknowledged."""
        self._stopping.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*self._tasks)

    async def applied(self, *, within_s: float) -> Counter[str]:
        """The counts since the start, once every acknowledged position is applied. Fails after `within_s`."""
        ends: dict[int, int] = {}
        for token in self.acknowledged.values():
            ends[token.partition] = max(ends.get(token.partition, -1), token.offset)
        deadline = time.monotonic() + within_s
        behind: dict[int, int] = dict(ends)
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                _, progress = await self._reader.read_progress()
                behind = {p: end for p, end in ends.items() if p not in progress or progress[p].watermark < end}
                if not behind:
                    return await self.counts() - self._before
            await asyncio.sleep(0.1)
        raise AssertionError(f"partitions not applied up to {behind} after {within_s} s")

    def asked_between(self, start: float, end: float) -> list[Answer]:
        return [answer for answer in self.answers if start <= answer.at < end]

    async def until_all(self, wanted: Callable[[Answer], bool], *, for_s: float, within_s: float) -> None:
        """Return when every answer of the last `for_s` seconds was as wanted; fails after `within_s`."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            await asyncio.sleep(for_s)
            last = self.asked_between(time.monotonic() - for_s, time.monotonic())
            if last and all(map(wanted, last)):
                return
        raise AssertionError(f"answers of the last {for_s} s: {[answer for answer in last if not wanted(answer)][:3]}")

    async def fresh_answer(self, *, within_s: float) -> gateway_pb2.RecommendResponse:
        """A Recommend without any degradation, for the last user written; fails after `within_s`."""
        deadline = time.monotonic() + within_s
        last = "no answer"
        while time.monotonic() < deadline:
            user, token = next(reversed(self._last_token.items()))
            with contextlib.suppress(grpc.aio.AioRpcError):
                response = await self._gateway.Recommend(
                    gateway_pb2.RecommendRequest(user_id=user, k=10, freshness_token=token), timeout=2.0
                )
                if not response.degradations and response.token_honoured:
                    return response
                last = ", ".join(Degradation.Name(kind) for kind in response.degradations)
            await asyncio.sleep(0.2)
        raise AssertionError(f"still degraded after {within_s} s: {last}")

    async def _write(self) -> None:
        writes: set[asyncio.Task[None]] = set()
        started, number = time.monotonic(), 0
        while not self._stopping.is_set():
            write = asyncio.create_task(self._write_one(number))
            writes.add(write)
            write.add_done_callback(writes.discard)
            number += 1
            await asyncio.sleep(max(0.0, started + number / self.events_per_s - time.monotonic()))
        await asyncio.gather(*writes)

    async def _write_one(self, number: int) -> None:
        user = self.user(number)
        event = events_pb2.Interaction(
            event_id=f"{self.prefix}-event-{number}",
            user_id=user,
            item_id=self.item_ids[(number * 7 + number // self.users) % len(self.item_ids)],
            type="click",
            value=1.0,
        )
        event.event_time.GetCurrentTime()
        request = gateway_pb2.RecordInteractionsRequest(interactions=[event])
        began, pause_s = time.monotonic(), 0.25
        while True:
            try:
                response = await self._gateway.RecordInteractions(request, timeout=5.0)
            except grpc.aio.AioRpcError as exc:
                self.refused.append((time.monotonic(), exc.code().name))
                if exc.code() not in _TRY_AGAIN:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
                continue
            receipt = response.receipts[0]
            self.written.append(Written(event, receipt, began, time.monotonic()))
            self.acknowledged[receipt.event_id] = receipt.token
            self._last_token.pop(user, None)
            self._last_token[user] = receipt.token
            return

    async def _read(self) -> None:
        reads: set[asyncio.Task[None]] = set()
        started, number = time.monotonic(), 0
        while not self._stopping.is_set():
            read = asyncio.create_task(self._read_one(number))
            reads.add(read)
            read.add_done_callback(reads.discard)
            number += 1
            await asyncio.sleep(max(0.0, started + number / self.reads_per_s - time.monotonic()))
        await asyncio.gather(*reads)

    async def _read_one(self, number: int) -> None:
        at, is_diverse, user = time.monotonic(), number % 2 == 1, self.user(number * 5)
        request = gateway_pb2.RecommendRequest(user_id=user, k=10, diversity=0.1 * is_diverse)
        # One with a token waits for it until shortly before its deadline; others are late on a busy machine alone.
        timeout_s = 5.0
        if self.with_tokens and not is_diverse and user in self._last_token:
            request.freshness_token.CopyFrom(self._last_token[user])
            timeout_s = 2.0
        try:
            response = await self._gateway.Recommend(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            self.answers.append(Answer(at, exc.code(), is_diverse))
            return
        self.answers.append(
            Answer(
                at,
                grpc.StatusCode.OK,
                is_diverse,
                items=len(response.items),
                degradations=frozenset(response.degradations),
                source=response.state_source,
                honoured=response.token_honoured or not request.HasField("freshness_token"),
            )
        )
