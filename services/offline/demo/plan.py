"""The replay process's input and output, which are two JSON files.

The replay has its own process, so that neither training's memory nor the progress bar delays it. `time_s` is
the event's own time in Unix seconds.

Letters: S scheduled events, M predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from loadtest.open_loop import MAX_IN_FLIGHT

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayEvent:
    """One held-out event; predicted: recommendations are requested before it is sent.

    previous: position of the same user's previous event, or -1. known: the model knows the item.
    """

    event_id: str
    user_id: str
    item_id: str
    type: str
    value: float
    time_s: int
    predicted: bool
    previous: int
    known: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """All inputs of the replay process."""

    gateway: str
    bootstrap: str
    topic: str
    epoch: str
    events: list[ReplayEvent]
    rate_per_s: float
    k: int = 10
    # A prediction is requested this long before its event. The event waits for a late answer.
    lead_ms: float = 100.0
    timeout_ms: float = 2000.0
    max_in_flight: int = MAX_IN_FLIGHT
    # For one event in this many, the time until recommendations reflect it is measured (once a second at 100 events/s).
    freshness_every: int = 100
    freshness_poll_ms: float = 20.0
    freshness_timeout_ms: float = 15_000.0
    # One acknowledged event in `duplicate_every` is sent again; one broken record per `malformed_every` events.
    duplicate_every: int = 500
    malformed_every: int = 400
    # Prefix of the broken records' ids, which are in a header.
    malformed_prefix: str = "malformed"
    # Recommend calls before the replay starts, which warm connections, caches and code paths.
    warm_up_calls: int = 100


@dataclass(kw_only=True, slots=True)
class Prediction:
    """One answer to Recommend.

    latency_ms counts from the scheduled moment. error: a failed call's gRPC status; a failed call counts as a miss.
    """

    position: int
    latency_ms: float
    item_ids: list[str] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    state_source: str = ""
    degradations: list[str] = field(default_factory=list)
    certificate: str = ""
    token_honoured: bool = False
    error: str = ""


@dataclass(kw_only=True, slots=True)
class ReplayResult:
    """What the replay observed.

    acknowledged: event id -> [partition, offset]. last_offsets: partition -> the newest acknowledged offset; repeated
    and broken records count.
    """

    predictions: list[Prediction] = field(default_factory=list)
    predictions_with_token: list[Prediction] = field(default_factory=list)
    acknowledged: dict[str, list[int]] = field(default_factory=dict)
    last_offsets: dict[int, int] = field(default_factory=dict)
    acknowledge_ms: list[float] = field(default_factory=list)
    unacknowledged: list[str] = field(default_factory=list)
    duplicates_sent: int = 0
    malformed_sent: int = 0
    freshness_ms: list[float] = field(default_factory=list)
    freshness_polls: int = 0
    unreflected: int = 0
    late_sends: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    send_errors: dict[str, int] = field(default_factory=dict)


def write(value: ReplayPlan | ReplayResult, path: Path) -> None:
    """Write a plan or a result as JSON."""
    path.write_bytes(TypeAdapter(type(value)).dump_json(value))


T = TypeVar("T", ReplayPlan, ReplayResult)


def read(kind: type[T], path: Path) -> T:
    """Return what `write` wrote."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


HITS_AT = 10


def answered_ranks(answers: Sequence[Sequence[str]], items: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the 0-based rank of each event's item in the answer, or a large number if the item is absent.

    Raises: ValueError if lengths differ.
    """
    if len(answers) != len(items):
        raise ValueError(f"{len(answers)} answers for {len(items)} events; expected one each")
    found = (
        list(answer).index(item) if item in answer else 1 << 30 for answer, item in zip(answers, items, strict=True)
    )
    return np.fromiter(found, dtype=np.int64)


def hit_rate(hit: npt.NDArray[np.bool_]) -> float | None:
    """Return the share of hits; None without predictions."""
    return round(float(hit.mean()), 5) if len(hit) else None


def rolling_rate(hit: npt.NDArray[np.bool_], *, window: int) -> npt.NDArray[np.float64]:
    """Return each prediction's share of hits among the last `window` ones (fewer at the start)."""
    total = np.concatenate([[0], np.cumsum(hit)])
    end = np.arange(1, len(hit) + 1)
    start = np.maximum(0, end - window)
    return np.asarray((total[end] - total[start]) / (end - start), dtype=np.float64)


def percentile(values: npt.NDArray[np.floating], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values (not NaN) do not exceed."""
    known = values[~np.isnan(values)]
    return round(float(np.quantile(known, share, method="inverted_cdf")), 3) if len(known) else None


def percentiles(values: npt.NDArray[np.floating], shares: Sequence[int] = (50, 95, 99)) -> dict[str, float | None]:
    """Return `{"p50": ..., "p95": ..., "p99": ...}` in the values' unit."""
    return {f"p{share}": percentile(values, share / 100) for share in shares}
