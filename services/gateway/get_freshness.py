"""GetFreshness: ask all components at once, and mark those that do not answer. An unavailable component is no error,
since GetFreshness is needed most during an outage.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from services.gateway.domain import Degradation
from services.gateway.ports import UNKNOWN, PartitionProgress, Ports, ServedIndex
from services.platform.errors import FreshetError
from services.user_state.values import Progress

log = structlog.get_logger()

T = TypeVar("T")

# Time limit for the processes of a version set to report what they serve.
_CHECK_S = 4.0
# Time limit for each component except the state store; longer than in Recommend, since busy is not unavailable.
_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshnessReport:
    """The answer. interactions: progress of user states. attributions: progress of item states."""

    model_version: str
    epoch: str
    interactions: Sequence[PartitionProgress]
    attributions: Sequence[PartitionProgress]
    candidates: ServedIndex | None
    reranker: ServedIndex | None
    degradations: Sequence[Degradation]


@dataclass(frozen=True, slots=True, kw_only=True)
class GetFreshness:
    """The handler."""

    ports: Ports
    model_version: str

    async def __call__(self) -> FreshnessReport:
        """Return the current positions, versions and degradations."""
        progress, ends, candidates, reranker, (attributions, all_refreshers) = await asyncio.gather(
            _or_none(self.ports.states.read_progress()),
            _or_none(self.ports.ends.interactions(_TIMEOUT_S)),
            _or_none(self.ports.candidates.served(_TIMEOUT_S)),
            _or_none(self.ports.reranker.served(_TIMEOUT_S)),
            self.ports.refreshers.folded(_TIMEOUT_S),
        )
        marks = {
            Degradation.STATE_STORE_DOWN: progress is None,
            Degradation.STALE_STATE: not self.ports.stream.encoder_serving,
            Degradation.NOT_FRESH: ends is None or not all_refreshers,
            Degradation.POPULAR_FALLBACK: candidates is None,
            Degradation.FIRST_STAGE_ORDER: reranker is None,
        }
        epoch, applied = progress or (None, {})
        return FreshnessReport(
            model_version=self.model_version,
            epoch=epoch or "",
            interactions=_interactions(applied, ends or {}),
            attributions=_newest(attributions),
            candidates=candidates,
            reranker=reranker,
            degradations=[kind for kind, is_set in marks.items() if is_set],
        )


async def check_processes(ports: Ports, model_version: str) -> str:
    """Return why candidates, reranker and refreshers do not serve this model; "" if they do."""

    async def ask(name: str, asked: Awaitable[ServedIndex]) -> str:
        try:
            await asked
        except FreshetError as exc:
            return f"{name}: no process that serves model {model_version} answers: {exc.message}"
        return ""

    *problems, (_, all_refreshers) = await asyncio.gather(
        ask("candidates", ports.candidates.served(_CHECK_S)),
        ask("reranker", ports.reranker.served(_CHECK_S)),
        ports.refreshers.folded(_CHECK_S),
    )
    return "; ".join(filter(None, (*problems, "" if all_refreshers else "refresher: not every one answers")))


def _interactions(progress: Mapping[int, Progress], ends: Mapping[int, int]) -> list[PartitionProgress]:
    return [
        PartitionProgress(partition=partition, applied_offset=one.watermark, end_offset=ends.get(partition, UNKNOWN))
        for partition, one in sorted(progress.items())
    ]


def _newest(found: list[PartitionProgress]) -> list[PartitionProgress]:
    """Return each partition's newest report: during a takeover two refreshers may report a partition."""
    newest = {one.partition: one for one in sorted(found, key=lambda one: one.applied_offset)}
    return [newest[partition] for partition in sorted(newest)]


async def _or_none(asked: Awaitable[T]) -> T | None:
    try:
        return await asked
    except FreshetError as exc:
        log.info("freshness_part_silent", error=type(exc).__name__, reason=exc.message)
        return None
