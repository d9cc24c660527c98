"""The demo's figures as one JSON object whose keys are a contract; its `notes` explain them.

Letters: M predictions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.demo.plan import (
    HITS_AT,
    Prediction,
    ReplayPlan,
    ReplayResult,
    hit_rate,
    percentile,
    percentiles,
)
from services.offline.demo.sittings import DEFINITION
from services.offline.evaluation.engine.metrics import gains

STAGES = ("queue", "encode", "first_stage", "transport")
BASELINES = ("item_knn", "recent_popularity", "popularity")
EVENT_COUNTS = ("sent", "applied", "dead_lettered", "duplicates")

NOTES = {
    "events": "sent: distinct acknowledged event ids, broken records included; sent = applied + dead_lettered",
    "hit_rate_at_10": "share of predicted events whose item is among the ten recommended before the event was sent; "
    "model: without a token; model_with_token: with the token of the user's previous event; both are asked as of the "
    "event's own time, which is what a real request at that moment would have known; frozen_state: the same model with "
    "user states frozen at the split, however long ago that is; popularity: training counts; recent_popularity and "
    "item_knn: learnt from every event before the predicted one; seen items left out of all",
    "hit_rate_at_10_by_sitting": DEFINITION,
    "over_best_baseline": "the model's hit rate over the highest of popularity's, recent_popularity's and item_knn's",
    "recommend_ms": "milliseconds from the scheduled moment to the answer, calls without a token, arrivals on a clock",
    "stages_ms": "medians, measured by the process that owns the stage; queue, first_stage and transport over "
    "the same calls; encode is not part of those calls: stored states are encoded when the event arrives, and this is "
    "how long the encoder process waits for the inference server then, one call for all users of a poll (what the "
    "calls themselves waited for encoding is encode_in_call_ms)",
    "freshness_ms": "milliseconds from an event's acknowledgement to the arrival of an answer whose state reflects it, "
    "found by asking every freshness_ms.poll_ms",
}


def stream_figures(
    plan: ReplayPlan, result: ReplayResult, stream_encode_ms: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return `recommend_ms`, `stages_ms`, `freshness_ms` and related figures.

    stream_encode_ms: p50 and p99, measured by the encoder process.
    """
    plain = in_order(result.predictions)
    with_token = in_order(result.predictions_with_token)
    latency = _latencies(plain)
    seconds = max(result.seconds, 1e-9)
    return {
        "recommend_ms": percentiles(latency) | {"max": percentile(latency, 1.0), "calls": len(plain)},
        "recommend_with_token_ms": percentiles(_latencies(with_token)) | {"calls": len(with_token)},
        **{
            name: {stage: percentile(_stage(plain, stage), share) for stage in STAGES} | {"encode": encode_ms}
            for name, share, encode_ms in (
                ("stages_ms", 0.5, stream_encode_ms.get("p50")),
                ("stages_p99_ms", 0.99, stream_encode_ms.get("p99")),
            )
        },
        "encode_in_call_ms": percentiles(_stage(plain, "encode"), (50, 99)),
        "freshness_ms": {
            **percentiles(np.array(result.freshness_ms)),
            "samples": len(result.freshness_ms),
            "unreflected": result.unreflected,
            "poll_ms": plan.freshness_poll_ms,
        },
        "acknowledge_ms": percentiles(np.array(result.acknowledge_ms)),
        "rates_per_s": {
            "events": round(len(plan.events) / seconds, 1),
            "recommend": round(len(plain) / seconds, 1),
            "recommend_with_token": round(len(with_token) / seconds, 1),
            "freshness_polls": round(result.freshness_polls / seconds, 1),
        },
        "answers": {
            "state_sources": dict(Counter(p.state_source or "failed" for p in plain)),
            "degradations": dict(Counter(name for p in plain for name in p.degradations)),
            "certificates": dict(Counter(p.certificate for p in plain if p.certificate)),
            "errors": dict(Counter(p.error for p in [*plain, *with_token] if p.error)),
            "tokens_honoured": sum(p.token_honoured for p in with_token),
        },
        "replay": {
            "seconds": round(result.seconds, 1),
            "cpu_share": round(result.cpu_seconds / seconds, 3),
            "events_held_for_their_prediction": result.late_sends,
            "send_errors": result.send_errors,
        },
    }


def event_counts(result: ReplayResult, before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Any]:
    """Return the number of acknowledged events, and the stream's counts from `before` to `after`."""
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in (*EVENT_COUNTS[1:], "unknown_items")}
    return {
        "sent": len(result.acknowledged),
        **counted,
        "duplicates_sent": result.duplicates_sent,
        "malformed_sent": result.malformed_sent,
        "unacknowledged": len(result.unacknowledged),
        # No record was lost or counted twice.
        "adds_up": len(result.acknowledged) == counted["applied"] + counted["dead_lettered"]
        and not result.unacknowledged,
    }


def hit_rates(
    ranks: Mapping[str, npt.NDArray[np.int64]],
) -> tuple[dict[str, float | None], dict[str, npt.NDArray[np.bool_]]]:
    """Return hit rate at 10 and hits (M,) per contender, by the evaluation's own metric."""
    hit = {name: gains(of, f"hr@{HITS_AT}") > 0 for name, of in ranks.items()}
    return {name: hit_rate(values) for name, values in hit.items()}, hit


def over_best_baseline(rates: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the best `baseline` and `factor`, the model's hit rate over the baseline's; None if no rate exceeds 0."""
    known = {name: rate for name in BASELINES if (rate := rates.get(name))}
    best = max(known, key=lambda name: known[name], default=None)
    model = rates.get("model")
    factor = round(model / known[best], 3) if best is not None and model is not None else None
    return {"baseline": best, "factor": factor}


def in_order(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return answers in the order of their events."""
    return sorted(predictions, key=lambda prediction: prediction.position)


def _latencies(predictions: Sequence[Prediction]) -> npt.NDArray[np.float64]:
    return np.array([prediction.latency_ms for prediction in predictions], dtype=np.float64)


def _stage(predictions: Sequence[Prediction], stage: str) -> npt.NDArray[np.float64]:
    return np.array([p.stages_ms[stage] for p in predictions if not p.error], dtype=np.float64)
