"""An experiment's results as one document for the console: now and at moments since its start, whole and by part.

A part is a surface or an entry of the requests' context. Intervals are not corrected for the number of parts.
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import duckdb

from services.contracts.topics.experiments import VISITOR, Experiment
from services.offline.experiments.differences import differences
from services.offline.experiments.results import (
    CONTEXT,
    Metric,
    Part,
    arm_sums,
    per_user,
    prepare,
    results,
    times_of,
)
from services.offline.experiments.sequential import MIN_USERS

MOMENTS, MAX_PARTS = 24, 16


def document(
    log: duckdb.DuckDBPyConnection,
    experiment: Experiment,
    metrics: Sequence[Metric],
    *,
    now_ms: int,
    horizon: timedelta,
    past: timedelta,
    tuned_for: int,
) -> dict[str, Any]:
    """Return the document, of plain values. Raises: as `results`."""
    prepare(log, experiment)
    settings: dict[str, Any] = {"horizon": horizon, "past": past, "tuned_for": tuned_for, "now_ms": now_ms}
    return {
        "experiment": experiment.name,
        "control": experiment.control.name,
        "metrics": [metric.name for metric in metrics],
        "until_ms": now_ms,
        "parts": [_of_part(log, experiment, metrics, only, settings) for only in (None, *_parts(log))],
    }


def _parts(log: duckdb.DuckDBPyConnection) -> list[Part]:
    """Return the parts with enough users, most users first, without parts that contain all exposures."""
    return log.execute(
        f"""
        WITH entries AS (
            SELECT user_key, 'surface' AS name, surface AS part FROM shown UNION ALL
            SELECT user_key, '{CONTEXT}' || one.key, one.value FROM (
                SELECT user_key, unnest(map_entries(context)) AS one FROM shown
            ) WHERE one.key <> '{VISITOR}'
        )
        SELECT name, part FROM entries GROUP BY ALL
        HAVING count(DISTINCT user_key) >= {2 * MIN_USERS} AND count(*) < (SELECT count(*) FROM shown)
        ORDER BY count(DISTINCT user_key) DESC, name, part LIMIT {MAX_PARTS}
        """
    ).fetchall()


def _of_part(
    log: duckdb.DuckDBPyConnection,
    experiment: Experiment,
    metrics: Sequence[Metric],
    only: Part | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    found = results(log, experiment, metrics, only=only, **settings)
    preference = []
    if (one := found.preferred) is not None:
        arm = experiment.arms[1].name
        preference = [f"Preference for {arm}, from -1 to 1: {one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}]."]
    return {
        "name": "" if only is None else f"{only[0].removeprefix(CONTEXT)} {only[1]}",
        "arms": {name: asdict(counts) for name, counts in found.arms.items()},
        "remarks": found.remarks + preference,
        "broken": list(map(list, found.broken)),
        "rows": []
        if experiment.interleaved or found.is_ratio_broken
        else _over_time(log, experiment, metrics, **settings),
    }


def _over_time(
    log: duckdb.DuckDBPyConnection,
    experiment: Experiment,
    metrics: Sequence[Metric],
    *,
    now_ms: int,
    horizon: timedelta,
    past: timedelta,
    tuned_for: int,
) -> list[dict[str, Any]]:
    """Return a row per moment, metric and arm, of the exposures that `results` prepared last.
    The last moment is now.
    """
    times = times_of(now_ms, horizon, past)
    (first,) = log.execute("SELECT min(first) FROM units WHERE arms = 1").fetchone() or (None,)
    if first is None or (span := times["now"] - horizon - first) <= timedelta(0):
        return []
    moments = [first + span * (nth + 1) / MOMENTS for nth in range(MOMENTS)]
    by_metric = {}
    for metric in metrics:
        per_user(log, metric, times)
        by_metric[metric.name] = arm_sums(log, [arm.name for arm in experiment.arms], moments)
    rows = []
    for nth, moment in enumerate(moments):
        sums = {name: {arm: of[nth] for arm, of in arms.items()} for name, arms in by_metric.items()}
        found = differences(sums, experiment.control.name, tuned_for=tuned_for)
        for name, arms in sums.items():
            for arm, one in arms.items():
                row = {"at_ms": round((moment + horizon).timestamp() * 1000), "metric": name, "arm": arm}
                row |= {"users": one.users, "mean": one.mean if one.users else None}
                if (apart := found.get((name, arm))) is not None:
                    row |= {"difference": apart.estimate.mean, "low": apart.estimate.low, "high": apart.estimate.high}
                    row["relative"] = apart.relative
                rows.append(row)
    return rows
