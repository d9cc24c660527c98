"""Record, stream and undo interactions and impressions: durable writes.

A failed request may have written some interactions. If it is repeated with the same event ids, each counts once. An
exposure id contains the answer's time and user, so a repeated request of impressions writes the same records.
"""

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from services.algorithms.bundles.event_schema import EventSchema, Role
from services.contracts.topics.interactions import Interaction, validate
from services.gateway.dependencies import AcknowledgedLag, Breaker
from services.gateway.domain import FreshnessToken, Impression, Receipt
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import UserStates
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.repeats import MAX_DISCOUNTED, MAX_IMPRESSIONS, TTL_HALF_LIVES, packed_items
from services.gateway.stages import Preferences, Stages
from services.platform import request_context
from services.platform.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    FreshetError,
    InvalidRequest,
    PermissionDenied,
    PreconditionFailed,
)
from services.platform.rpc import admission
from services.platform.stream.records import Position
from services.platform.threads import in_turn, side_by_side
from services.platform.validation import validate_id
from services.user_state.layout import IMPRESSIONS
from services.user_state.values import now_ms

MAX_BATCH = 1000
MAX_STREAM = 100_000
MAX_IN_FLIGHT = 256
RETRY_AFTER_MS = 500
_ANSWER_RESERVE_S = 0.05
# A healthy stream acknowledges in milliseconds, so a time-out of at least this length is the stream's failure.
_PATIENCE_S = 0.4
_EPOCH_S = 0.5


def write_timeout_s(limit_s: float, what: str) -> float:
    """Return the time limit of a write: at most `limit_s`, and less than the caller's deadline.

    Raises: DeadlineExceeded if too little time is left to write `what`.
    """
    remaining = request_context.remaining_seconds()
    timeout_s = limit_s if remaining is None else min(limit_s, remaining - _ANSWER_RESERVE_S)
    if timeout_s <= 0:
        raise DeadlineExceeded(f"too little of the deadline is left to write {what}")
    return timeout_s


class EpochCache:
    """The stream's epoch, read at most once per `_EPOCH_S`."""

    def __init__(self, states: UserStates) -> None:
        self._states = states
        self._epoch = ""
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None

    async def current(self) -> str:
        """Return the last known epoch, "" if none is known. This does not fail: writes do not need Redis."""
        if self._read_at is not None and time.monotonic() - self._read_at < _EPOCH_S:
            return self._epoch
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())
        # A caller that is cancelled must not cancel the read for the others.
        await asyncio.shield(self._reading)
        return self._epoch

    async def _read(self) -> None:
        try:
            self._epoch = await self._states.epoch() or ""
        except FreshetError:
            # Keep the last epoch. If it has ended, no answer honours its tokens, which is correct.
            pass
        finally:
            self._read_at = time.monotonic()
            self._reading = None


class RecordInteractions:
    """Handles the RPCs RecordInteractions, StreamInteractions and UndoInteraction."""

    def __init__(
        self,
        *,
        stages: Stages,
        lag: AcknowledgedLag,
        metrics: GatewayMetrics,
        exposures: Exposures,
        preferences: Preferences,
    ) -> None:
        self._ports, self._schema = stages.ports, stages.model.schema
        self._lag, self._metrics, self._exposures, self._preferences = lag, metrics, exposures, preferences
        self._append_timeout_s = stages.limits.append_timeout_s
        self._epochs = EpochCache(self._ports.states)
        self._breaker = Breaker("interaction_log", open_seconds=stages.limits.breaker_s)

    async def __call__(self, interactions: Sequence[Interaction]) -> list[Receipt]:
        """Write a request's interactions; return receipts in order.

        Raises: InvalidRequest, PermissionDenied for another user's exposure, before anything is written;
        DependencyUnavailable with a retry hint if not all were acknowledged, or DeadlineExceeded if the caller's
        deadline was too short for that.
        """
        await in_turn(self._check, interactions, now_ms())
        return await self.write(interactions)

    def takes(self, interaction: Interaction) -> bool:
        return bool(interaction.item_id) and self._schema.weight_for(interaction.type, interaction.value) > 0

    async def write(self, interactions: Sequence[Interaction]) -> list[Receipt]:
        """Write validated interactions. Raises: DependencyUnavailable, as `__call__`."""
        outcomes = await side_by_side([self._append(_with_id(interaction)) for interaction in interactions])
        receipts, failure = _sorted(outcomes)
        if failure is not None:
            raise _with_count(failure, len(receipts), len(interactions))
        await self._keep_seen(interactions)
        return receipts

    async def _keep_seen(self, written: Iterable[Interaction]) -> None:
        """Store impressions for discounts of scores. A lost impression gives no discount."""
        of_user: dict[str, deque[Interaction]] = {}
        for one in written if self._preferences.impression_discount else ():
            if self._schema.of(one.type).role is Role.EXPOSURE:
                of_user.setdefault(one.user_id, deque(maxlen=MAX_DISCOUNTED)).append(one)
        ttl_s = round(TTL_HALF_LIVES * self._preferences.impression_half_life_s)
        for user_id, seen in of_user.items():
            entry = packed_items(max(one.event_time_ms for one in seen), [one.item_id for one in seen])
            try:
                await self._ports.sessions.push(IMPRESSIONS, user_id, entry, most=MAX_IMPRESSIONS, ttl_seconds=ttl_s)
            except FreshetError:
                self._metrics.component_failed("sessions")

    async def stream(self, interactions: AsyncIterator[Interaction]) -> list[Receipt]:
        """Write each interaction of a client stream on arrival; return all receipts at the end.

        Raises: as `__call__`, with the number of messages written before.
        """
        pending: list[asyncio.Task[Receipt]] = []
        sent: list[Interaction] = []
        window = asyncio.Semaphore(MAX_IN_FLIGHT)
        refused: FreshetError | None = None
        cut_short = False

        async def append(interaction: Interaction) -> Receipt:
            try:
                return await self._append(interaction)
            finally:
                window.release()

        try:
            try:
                async for interaction in interactions:
                    position = len(pending)
                    if position >= MAX_STREAM:
                        refused = InvalidRequest.of(
                            "stream", f"more than {MAX_STREAM} messages", f"at most {MAX_STREAM}"
                        )
                        break
                    self._check_one(interaction, now_ms(), f"stream[{position}].interaction.")
                    await window.acquire()
                    sent.append(_with_id(interaction))
                    pending.append(asyncio.create_task(append(sent[-1])))
                    if not self._breaker.closed:
                        # The result of this append shows whether Kafka recovered.
                        await asyncio.wait(pending[-1:])
                        if not self._breaker.closed:
                            cut_short = True
                            break
            except (InvalidRequest, PermissionDenied, DeadlineExceeded) as exc:
                refused = exc
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
        except BaseException:
            for task in pending:
                task.cancel()
            raise
        receipts, failure = _sorted(outcomes)
        await self._keep_seen(one for one, outcome in zip(sent, outcomes, strict=True) if isinstance(outcome, Receipt))
        if failure is None and cut_short:
            failure = DependencyUnavailable("the stream became unreachable", retry_after_ms=RETRY_AFTER_MS)
        if failure is not None:
            raise _with_count(failure, len(receipts), len(pending))
        if refused is not None:
            raise type(refused)(f"{refused.message}; {len(receipts)} earlier messages were written")
        if not receipts:
            raise InvalidRequest.of("stream", "no message", "at least 1 message")
        return receipts

    async def undo(self, user_id: str, event_id: str) -> Receipt:
        """Write the undo of a user's event. A repeated undo has the same id."""
        validate_id("user_id", user_id)
        validate_id("event_id", event_id)
        digest = hashlib.sha256(f"{user_id}\0{event_id}".encode()).hexdigest()[:32]
        undo = Interaction(user_id=user_id, event_id=f"undo-{digest}", undoes_event_id=event_id, event_time_ms=now_ms())
        return await self._append(undo)

    def _check(self, interactions: Sequence[Interaction], now_ms: int) -> None:
        if not 1 <= len(interactions) <= MAX_BATCH:
            raise InvalidRequest.of("interactions", f"{len(interactions)} interactions", f"1-{MAX_BATCH}")
        for position, interaction in enumerate(interactions):
            self._check_one(interaction, now_ms, f"interactions[{position}].")

    def _check_one(self, interaction: Interaction, now_ms: int, prefix: str) -> None:
        """Check one interaction. prefix: precedes the field's name in errors."""
        try:
            validate(interaction, now_ms)
        except InvalidRequest as exc:
            raise InvalidRequest(prefix + exc.message) from exc
        if interaction.exposure_id:
            self._exposures.check_named(interaction.exposure_id, interaction.user_id, f"{prefix}exposure_id")

    async def _append(self, interaction: Interaction) -> Receipt:
        began = time.monotonic()
        timeout_s = write_timeout_s(self._append_timeout_s, "the interaction")

        async def append() -> Position:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._ports.interactions.append(interaction, timeout_s + 1)
            except TimeoutError as exc:
                raise DeadlineExceeded(f"no acknowledgement within {timeout_s * 1000:.0f} ms") from exc

        patient = timeout_s >= _PATIENCE_S
        try:
            position = await self._breaker.run(append, patient=patient)
        except DeadlineExceeded as exc:
            self._metrics.append_failed()
            if not patient:
                raise
            raise DependencyUnavailable(f"Kafka: {exc.message}", retry_after_ms=RETRY_AFTER_MS) from exc
        except FreshetError as exc:
            self._metrics.append_failed()
            exc.retry_after_ms = RETRY_AFTER_MS if exc.retriable else None
            raise
        self._lag.acknowledged(position)
        if self._lag.writes_yield(position.partition):
            admission.yield_to_others()
        self._metrics.acknowledged(time.monotonic() - began)
        epoch = await self._epochs.current()
        return Receipt(interaction.event_id, FreshnessToken(epoch, position.partition, position.offset))


def _sorted(outcomes: Sequence[Receipt | BaseException]) -> tuple[list[Receipt], BaseException | None]:
    failure = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    return [outcome for outcome in outcomes if isinstance(outcome, Receipt)], failure


def _with_id(interaction: Interaction) -> Interaction:
    return interaction if interaction.event_id else replace(interaction, event_id=secrets.token_hex(16))


def _with_count(failure: BaseException, written: int, total: int) -> BaseException:
    if total == 1 or not isinstance(failure, FreshetError):
        return failure
    message = f"{failure.message}; {written} of {total} were acknowledged, send all again with the same event ids"
    return type(failure)(message, retriable=failure.retriable, retry_after_ms=failure.retry_after_ms)


IMPRESSION = "impression"
MAX_POSITION = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordImpressions:
    """Handles the RPC RecordImpressions."""

    exposures: Exposures
    record: RecordInteractions
    schema: EventSchema

    async def __call__(self, user_id: str, exposure_id: str, impressions: Sequence[Impression]) -> list[Receipt]:
        """Write impressions; return receipts in order.

        Raises: InvalidRequest, PermissionDenied for another user's exposure, PreconditionFailed if the model's schema
        gives impressions another role, before anything is written; and as RecordInteractions.
        """
        validate_id("user_id", user_id)
        if not 1 <= len(impressions) <= MAX_BATCH:
            raise InvalidRequest.of("impressions", f"{len(impressions)} impressions", f"1-{MAX_BATCH}")
        if self.schema.of(IMPRESSION).role is not Role.EXPOSURE:
            raise PreconditionFailed(
                f"events.yaml of the served model: type {IMPRESSION!r} has another role; allowed: exposure. Train with "
                "a schema that gives it this role, or record interactions of a type of your own"
            )
        shown_ms = self.exposures.time_of(exposure_id, user_id)
        positions = set[int]()
        for number, one in enumerate(impressions):
            validate_id(f"impressions[{number}].item_id", one.item_id)
            if not 1 <= one.position <= MAX_POSITION or one.position in positions:
                allowed = f"1-{MAX_POSITION}, each once"
                raise InvalidRequest.of(f"impressions[{number}].position", one.position, allowed)
            positions.add(one.position)
        return await self.record.write(
            [
                Interaction(
                    user_id=user_id,
                    item_id=one.item_id,
                    # A position counts once, even if a later request names another item.
                    event_id=f"impression-{_digest(exposure_id, one.position)}",
                    type=IMPRESSION,
                    event_time_ms=shown_ms,
                    context={"position": str(one.position)},
                    exposure_id=exposure_id,
                )
                for one in impressions
            ]
        )


def _digest(exposure_id: str, position: int) -> str:
    return hashlib.blake2b(f"{exposure_id}\0{position}".encode(), digest_size=16).hexdigest()
