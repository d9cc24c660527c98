"""An experiment's results from the log: users and counts by arm, differences from the control with their certainty.

A user counts once the horizon after the first exposure is over, with all interactions within it, whatever was shown.
In counts by surface, position or day, an interaction belongs to the exposure that it names, else to the user's newest
exposure with the item in the window before it. No difference is reported while the numbers of users contradict the
arms' shares (`sample_ratio`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb

from services.algorithms.rules.team_draft import BOTH
from services.contracts.topics.experiments import CONSOLE, Experiment
from services.offline.evaluation.engine.intervals import Estimate
from services.offline.experiments.differences import CAPPED_ABOVE, ArmSums, Difference, differences, preference
from services.offline.experiments.log import quoted
from services.offline.experiments.sample_ratio import ALARM, p_value
from services.platform.errors import InvalidRequest, PreconditionFailed

SPLITS = {
    "day": "CAST(s.shown AS DATE)",
    "surface": "s.surface",
    "model": "s.model_version",
    "position": "s.first_position + list_position(s.item_ids, i.item_id) - 1",
}
# An interaction without an exposure id belongs to an exposure of its item at most this long before it.
WINDOW = timedelta(days=1)
# A part of the exposures: ("surface" or the name of an entry of the request's context, its value).
Part = tuple[str, str]
CONTEXT = "context."
_NO_EXPOSURE_ID = "i.exposure_id IS NULL OR i.exposure_id = ''"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A user's value: the number of a type's interactions, or the sum of their values.

    margin: makes the metric a guardrail. It limits an arm's difference, as a share of the control's mean. A negative
    margin limits a loss, a positive margin a rise.
    """

    type: str
    of_values: bool = False
    margin: float | None = None

    @property
    def name(self) -> str:
        return f"{self.type}:value" if self.of_values else self.type

    @property
    def amount(self) -> str:
        """What an interaction counts, in SQL."""
        return "value" if self.of_values else "1::DOUBLE"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmCounts:
    """An arm's numbers of users, of users whose horizon is over (counted), of exposures and of shown items."""

    users: int
    counted: int
    exposures: int
    shown: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Capped:
    """The number of users whose value is above `limit` and counts as the limit."""

    users: int
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results as of `until` (Unix milliseconds).

    differences: (metric, arm) -> difference from the control; empty if the sample ratio is broken
    or the experiment is interleaved. broken: (metric,
    arm) of guardrails whose whole interval is beyond the margin. preferred: only for an interleaved experiment, in
    [-1, 1]; users prefer the second team if it is above zero.
    """

    experiment: str
    until: int
    arms: Mapping[str, ArmCounts]
    in_two_arms: int
    sample_ratio: float
    means: Mapping[tuple[str, str], float]
    differences: Mapping[tuple[str, str], Difference]
    broken: Sequence[tuple[str, str]]
    capped: Mapping[str, Capped]
    unknown_exposures: int
    preferred: Estimate | None

    @property
    def is_ratio_broken(self) -> bool:
        return self.sample_ratio <= ALARM

    @property
    def remarks(self) -> list[str]:
        """Sentences about what cannot be compared, and what is capped or left out."""
        said = [
            f"{one.users:,} users had more than {one.limit:g} of {name}, and count with that."
            for name, one in self.capped.items()
        ]
        if self.is_ratio_broken:
            why = "something loses users of one arm, or counts them twice. No difference is shown; find the loss first."
            said.insert(0, f"The arms' users do not fit their shares (p {self.sample_ratio:.1g}): {why}")
        if self.in_two_arms:
            said.append(f"{self.in_two_arms:,} users were shown two arms, and are left out.")
        if self.unknown_exposures:
            said.append(f"{self.unknown_exposures:,} interactions name exposures that are not in the log.")
        return said


def results(
    log: duckdb.DuckDBPyConnection,
    experiment: Experiment,
    metrics: Sequence[Metric],
    *,
    now_ms: int,
    horizon: timedelta = timedelta(days=1),
    past: timedelta = timedelta(days=14),
    tuned_for: int,
    only: Part | None = None,
) -> Results:
    """Compare the arms.

    log: from `opened_log`. past: CUPED's time range before the first exposure. only: count these exposures alone.
    Raises: PreconditionFailed if nobody was exposed; InvalidRequest for a metric whose type never occurred.
    """
    prepare(log, experiment, only)
    check_metrics(log, metrics)
    times = times_of(now_ms, horizon, past)
    arms = _arm_counts(log, experiment, times)
    shares = {arm.name: arm.share for arm in experiment.arms}
    ratio = 1.0 if experiment.interleaved else p_value({name: one.users for name, one in arms.items()}, shares)
    sums: dict[str, dict[str, ArmSums]] = {}
    capped: dict[str, Capped] = {}
    if not experiment.interleaved:
        for metric in metrics:
            capped[metric.name] = per_user(log, metric, times)
            sums[metric.name] = {arm: by_moment[0] for arm, by_moment in arm_sums(log, list(shares)).items()}
    found = {} if ratio <= ALARM else differences(sums, experiment.control.name, tuned_for=tuned_for)
    return Results(
        experiment=experiment.name,
        until=now_ms,
        arms=arms,
        in_two_arms=_one(log, "SELECT count(*) FROM units WHERE arms > 1"),
        sample_ratio=ratio,
        means={(m, a): one.mean for m, by_arm in sums.items() for a, one in by_arm.items() if one.users},
        differences=found,
        broken=[
            (metric.name, arm)
            for metric in metrics
            if metric.margin is not None
            for (name, arm), one in found.items()
            if name == metric.name and _breaks(one, metric.margin)
        ],
        capped={name: one for name, one in capped.items() if one.users},
        unknown_exposures=_unknown_exposures(log),
        preferred=_preferred(log, metrics, tuned_for) if experiment.interleaved else None,
    )


def counts_by(
    log: duckdb.DuckDBPyConnection, experiment: Experiment, split: str, *, window: timedelta = WINDOW
) -> list[dict[str, Any]]:
    """Return attributed interactions as rows of arm, the split's value, type, events and value.

    split: one of `SPLITS`. Raises: InvalidRequest for another split.
    """
    if split not in SPLITS:
        raise InvalidRequest.of("by", split, f"one of {', '.join(SPLITS)}")
    prepare(log, experiment)
    query = attributed(f"s.arm, {SPLITS[split]} AS part")
    rows = log.execute(
        f"{query} SELECT arm, part, type, count(*), sum(value) FROM taken GROUP BY ALL ORDER BY ALL", {"window": window}
    ).fetchall()
    names = ("arm", split, "type", "events", "value")
    return [dict(zip(names, row, strict=True)) for row in rows]


def attributed(columns: str) -> str:
    """Return the WITH clause of `taken`: attributed interactions with these columns, type and value.

    columns: expressions of the exposure `s` and the interaction `i`. Parameter: window.
    """
    columns += ", i.type, i.value"
    return f"""
        WITH named AS (
            SELECT {columns} FROM interactions i JOIN shown s USING (exposure_id)
        ), matched AS (
            SELECT {columns},
                row_number() OVER (
                    PARTITION BY i.user_key, i.item_id, i.event_time, i.type ORDER BY s.shown DESC
                ) AS nth
            FROM interactions i JOIN shown s ON s.user_key = i.user_key AND s.shown <= i.event_time
                AND i.event_time < s.shown + $window AND list_contains(s.item_ids, i.item_id)
            WHERE {_NO_EXPOSURE_ID}
        ), taken AS (
            SELECT * FROM named UNION ALL SELECT * EXCLUDE (nth) FROM matched WHERE nth = 1
        )"""


def _unknown_exposures(log: duckdb.DuckDBPyConnection) -> int:
    log.execute(
        "CREATE OR REPLACE TEMP TABLE named AS SELECT i.exposure_id, count(*) AS n FROM interactions i "
        "JOIN units USING (user_key) WHERE i.exposure_id <> '' GROUP BY i.exposure_id"
    )
    named = _one(log, "SELECT coalesce(sum(n), 0) FROM named")
    # In this order the join's hash table has only the named ids, not those of all exposures.
    return named - _one(log, "SELECT coalesce(sum(n), 0) FROM exposures JOIN named USING (exposure_id)")


def _breaks(one: Difference, margin: float) -> bool:
    bound = margin * abs(one.control)
    return one.estimate.high < bound if margin < 0 else one.estimate.low > bound


def times_of(now_ms: int, horizon: timedelta, past: timedelta) -> dict[str, Any]:
    """Return the parameters of `per_user`."""
    return {"now": datetime.fromtimestamp(now_ms / 1000, UTC), "horizon": horizon, "past": past}


def prepare(log: duckdb.DuckDBPyConnection, experiment: Experiment, only: Part | None = None) -> None:
    """Create `shown`, the experiment's exposures with their arm, and `units`, its users with arm and first exposure.

    The console's exposures are left out. Raises: PreconditionFailed without a user.
    """
    where = ""
    if only is not None:
        name, value = only
        column = name if name == "surface" else f"context[{quoted(name.removeprefix(CONTEXT))}]"
        where = f" AND {column} = {quoted(value)}"
    # A view, so that each query reads only its columns. A name has no quote (`experiments.check`).
    log.execute(
        "CREATE OR REPLACE TEMP VIEW shown AS SELECT * EXCLUDE (assignments, a), a.arm AS arm FROM (SELECT *, "
        f"list_filter(assignments, lambda x: x.experiment = '{experiment.name}' AND x.share > 0)[1] AS a "
        f"FROM exposures WHERE context['surface'] IS DISTINCT FROM '{CONSOLE}'{where}) WHERE a IS NOT NULL"
    )
    log.execute(
        "CREATE OR REPLACE TEMP TABLE units AS SELECT user_key, min(shown) AS first, any_value(arm) AS arm, "
        "count(DISTINCT arm) AS arms FROM shown GROUP BY user_key"
    )
    if not _one(log, "SELECT count(*) FROM units"):
        raise PreconditionFailed(f"nobody was exposed to experiment {experiment.name!r} yet: has it been started?")


def check_metrics(log: duckdb.DuckDBPyConnection, metrics: Sequence[Metric]) -> None:
    """Check that every metric's type occurred. Raises: InvalidRequest."""
    known = {kind for (kind,) in log.execute("SELECT DISTINCT type FROM interactions").fetchall()}
    for metric in metrics:
        if metric.type not in known:
            raise InvalidRequest.of(
                "metric", metric.type, f"a type that occurred: {', '.join(sorted(known)) or 'none did'}"
            )


def _arm_counts(
    log: duckdb.DuckDBPyConnection, experiment: Experiment, times: Mapping[str, Any]
) -> dict[str, ArmCounts]:
    found = {
        arm: ArmCounts(users=users, counted=counted, exposures=exposures, shown=shown)
        for arm, users, counted, exposures, shown in log.execute(
            """
            SELECT u.arm, count(*), count(*) FILTER (u.first + $horizon <= $now), sum(s.exposures), sum(s.items)
            FROM units u JOIN (
                SELECT user_key, count(*) AS exposures, sum(len(item_ids)) AS items FROM shown GROUP BY user_key
            ) s
            USING (user_key) WHERE u.arms = 1 GROUP BY u.arm
            """,
            {"horizon": times["horizon"], "now": times["now"]},
        ).fetchall()
    }
    none = ArmCounts(users=0, counted=0, exposures=0, shown=0)
    names = [""] if experiment.interleaved else [arm.name for arm in experiment.arms]
    return {name: found.get(name, none) for name in names}


def per_user(log: duckdb.DuckDBPyConnection, metric: Metric, times: Mapping[str, Any]) -> Capped:
    """Create `per_user`: arm, first exposure, y and x of each user whose horizon is over, capped."""
    log.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE per_user AS
        SELECT u.user_key, u.arm, u.first,
            coalesce(sum({metric.amount}) FILTER (i.event_time >= u.first), 0)::DOUBLE AS y,
            coalesce(sum({metric.amount}) FILTER (i.event_time < u.first), 0)::DOUBLE AS x
        FROM units u LEFT JOIN interactions i ON i.user_key = u.user_key AND i.type = $type
            AND i.event_time >= u.first - $past AND i.event_time < u.first + $horizon
        WHERE u.arms = 1 AND u.first + $horizon <= $now GROUP BY u.user_key, u.arm, u.first
        """,
        {"type": metric.type, **times},
    )
    limits = log.execute(
        f"SELECT quantile_disc(y, {CAPPED_ABOVE}), quantile_disc(x, {CAPPED_ABOVE}) FROM per_user"
    ).fetchone()
    most, most_before = (math.inf if limit is None else limit for limit in limits or (None, None))
    over = _one(log, "SELECT count(*) FROM per_user WHERE y > ?", [most])
    log.execute("UPDATE per_user SET y = least(y, ?), x = least(x, ?)", [most, most_before])
    return Capped(users=over, limit=float(most))


def arm_sums(
    log: duckdb.DuckDBPyConnection, arms: Sequence[str], moments: Sequence[datetime] = ()
) -> dict[str, list[ArmSums]]:
    """Return arm -> the sums over `per_user` of users first exposed up to each moment (ascending).

    Without moments, one element: the sums over all users.
    """
    number = "0" if not moments else "list_position(list_transform($moments, lambda m: first <= m), true) - 1"
    rows = log.execute(
        f"SELECT arm, {number} AS nth, count(*), sum(y), sum(y * y), sum(x), sum(x * x), sum(x * y) FROM per_user "
        "GROUP BY ALL HAVING nth IS NOT NULL ORDER BY nth",
        {"moments": list(moments)} if moments else {},
    ).fetchall()
    found = {arm: [ArmSums(users=0, y=0.0, yy=0.0)] * max(1, len(moments)) for arm in arms}
    for arm, nth, *more in rows:
        found[arm][nth:] = [one.plus(ArmSums(*more)) for one in found[arm][nth:]]
    return found


def _preferred(log: duckdb.DuckDBPyConnection, metrics: Sequence[Metric], tuned_for: int) -> Estimate | None:
    found = log.execute(
        "SELECT sum(CASE WHEN team = 1 THEN 1 ELSE -1 END)::DOUBLE AS credit, count(*)::DOUBLE AS takes FROM ("
        "SELECT i.user_key, s.teams[list_position(s.item_ids, i.item_id)] AS team "
        "FROM interactions i JOIN shown s USING (exposure_id) WHERE i.type = ?) "
        f"WHERE team < {BOTH} GROUP BY user_key",
        [metrics[0].type],
    ).fetchnumpy()
    return preference(found["credit"], found["takes"], tuned_for=tuned_for)


def _one(log: duckdb.DuckDBPyConnection, query: str, values: Sequence[Any] = ()) -> int:
    row = log.execute(query, list(values)).fetchone()
    return int(row[0]) if row else 0
