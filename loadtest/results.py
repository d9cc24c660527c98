"""A run's measurements as arrays, and the summary for people and machines.

Latency counts from the moment a call was due, so a stall shows in every call that was due while it lasted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .open_loop import NOT_SENT, FloatArray

OK = "OK"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Data from one answer: milliseconds per stage, degradations to count, other counts."""

    stages_ms: dict[str, float] = field(default_factory=dict)
    degradations: Sequence[str] = ()
    counts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call: due and sent in seconds since the start, latency from due; `status` is OK, a gRPC code or NOT_SENT."""

    due_s: float
    sent_s: float
    latency_ms: float
    status: str
    outcome: Outcome | None = None


@dataclass(kw_only=True, slots=True)
class RunResults:
    """All calls of a run by stream name, with its planned length and warm-up."""

    seconds: float
    warmup_s: float
    calls: dict[str, list[Call]]
    peak_in_flight: int = 0
    interrupted: bool = False

    def measured(self, stream: str) -> list[Call]:
        """Return the stream's calls that were due after the warm-up."""
        return [call for call in self.calls[stream] if call.due_s >= self.warmup_s]


class SetUpError(Exception):
    """The target is not as the scenario needs it; the message says what it needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim about a run. `held` None: not measured this time."""

    says: str
    value: float | None
    allowed: str
    held: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """A scenario's own observations; `findings` is plain JSON."""

    claims: Sequence[Claim] = ()
    findings: dict[str, Any] = field(default_factory=dict)


def percentiles_ms(values: Sequence[float] | FloatArray) -> dict[str, float | None]:
    """Return p50, p95, p99 and max, rounded to a microsecond; None without values."""
    if not len(values):
        return dict.fromkeys(("p50", "p95", "p99", "max"))
    p50, p95, p99, highest = np.percentile(np.asarray(values), [50, 95, 99, 100]).round(3).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": highest}


def summarise(results: RunResults) -> dict[str, Any]:
    """Return the machine-readable part of a report, without the warm-up.

    Latency percentiles are over successful calls; errors and calls that were never sent are listed with them.
    """
    measured_s = max(results.seconds - results.warmup_s, 1e-9)
    measured = [call for name in results.calls for call in results.measured(name)]
    outcomes = [call.outcome for call in measured if call.outcome is not None]
    return {
        "seconds": results.seconds,
        "warmup_seconds": results.warmup_s,
        "interrupted": results.interrupted,
        "peak_in_flight": results.peak_in_flight,
        "calls": {name: _summarise_calls(results.measured(name), measured_s) for name in results.calls},
        "stages_ms": _stages(outcomes),
        "degradations": dict(sorted(Counter(mark for one in outcomes for mark in one.degradations).items())),
        "counts": dict(sorted(Counter(count for one in outcomes for count in one.counts).items())),
        "error_share": round(sum(call.status != OK for call in measured) / len(measured), 6) if measured else 0.0,
    }


def caveats(summary: dict[str, Any], *, timeout_ms: float) -> list[str]:
    """Return caveats for a reader of the numbers, as sentences."""
    found = ["latency counts from the scheduled arrival; the load generator and the target share this machine's cores"]
    for name, call in summary["calls"].items():
        late_ms = call["send_delay_ms"]["p99"]
        if late_ms is not None and late_ms > 5.0:
            found.append(f"{name}: the generator itself sent late (p99 {late_ms:.1f} ms); that is in the latency")
        if call["not_sent"]:
            found.append(f"{name}: {call['not_sent']} calls were not sent, because too many were in flight")
        if call["ok"] < 1_000:
            found.append(f"{name}: p99 rests on {call['ok']} calls")
        if call["errors"].get("DEADLINE_EXCEEDED"):
            found.append(f"{name}: timeouts ({timeout_ms:g} ms) are counted as errors, not in the percentiles")
    if summary["interrupted"]:
        found.append(f"the run was interrupted after {summary['seconds']:g} s")
    return found


def _summarise_calls(calls: list[Call], measured_s: float) -> dict[str, Any]:
    by_status = Counter(call.status for call in calls)
    succeeded = [call for call in calls if call.status == OK]
    sent = [call for call in calls if call.status != NOT_SENT]
    not_sent = by_status.pop(NOT_SENT, 0)
    return {
        "offered_per_s": round(len(calls) / measured_s, 3),
        "achieved_per_s": round(len(succeeded) / measured_s, 3),
        "sent": len(sent),
        "ok": by_status.pop(OK, 0),
        "not_sent": not_sent,
        "errors": dict(sorted(by_status.items())),
        "latency_ms": percentiles_ms([call.latency_ms for call in succeeded]),
        "send_delay_ms": percentiles_ms([(call.sent_s - call.due_s) * 1e3 for call in sent]),
    }


def _stages(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    times: dict[str, list[float]] = {}
    for outcome in outcomes:
        for stage, stage_ms in outcome.stages_ms.items():
            times.setdefault(stage, []).append(stage_ms)
    return {stage: percentiles_ms(values) for stage, values in times.items()}
