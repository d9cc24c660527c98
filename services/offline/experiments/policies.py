"""Rewards that another policy would have got, from the log of the policy that ran (decision 098).

The other policy chooses arms by the request's context, or answers without positions for new items. A reward is an
interaction attributed to an answer (`results.attributed`). The doubly robust reward model is the mean of a cell
(context and arm, or position and kind of item) over the other half of the users.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
import numpy.typing as npt

from services.algorithms.rules.reserved_positions import MAX_POSITIONS
from services.contracts.topics.experiments import CONSOLE, Experiment
from services.offline.experiments.log import quoted
from services.offline.experiments.off_policy import Array, NoSupport, PolicyValue, doubly_robust, ips, snips
from services.offline.experiments.results import WINDOW, Metric, attributed, check_metrics, prepare
from services.offline.experiments.sequential import MIN_USERS
from services.platform.errors import InvalidRequest

# The mean weight of a log with the right propensities is 1. A log is refused if its mean weight differs
# from 1 by more than this many times half the 95 % interval: one false refusal in a million.
_REFUSED_BEYOND = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The arm for requests with this entry in their context, or, without a name, for all requests."""

    arm: str
    name: str = ""
    value: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Rewards per answer. ran: that of the policy that ran; other: estimator -> that of the other policy.

    positions: the number of first positions of an answer that count; None means all.
    """

    answers: int
    users: int
    positions: int | None
    ran: PolicyValue
    other: Mapping[str, PolicyValue]


def of_arms(
    log: duckdb.DuckDBPyConnection, experiment: Experiment, given: Sequence[Given], metric: Metric
) -> Estimates:
    """Estimate a policy that gives each request the arm of the first entry of `given` that fits its context.

    Raises: NoSupport; InvalidRequest if the last entry does not fit all requests, or see `results`; PreconditionFailed.
    """
    if not given or given[-1].name:
        raise InvalidRequest.of("give", given[-1].arm if given else "nothing", "an arm for all other requests, as last")
    names = [arm.name for arm in experiment.arms]
    if experiment.interleaved:
        raise NoSupport("an interleaved answer has items of both arms: `freshet results` says which arm is preferred")
    for one in given:
        if one.arm not in names:
            raise NoSupport(f"no user had arm {one.arm!r}, so the log says nothing of it; allowed: {', '.join(names)}")
    prepare(log, experiment)
    check_metrics(log, [metric])
    cases = "".join(
        f" WHEN context[{quoted(one.name)}] = {quoted(one.value)} THEN {number}"
        for number, one in enumerate(given[:-1])
    )
    segment = f"CASE{cases} ELSE {len(given) - 1} END" if cases else "0"
    rows = log.execute(
        f"{attributed('s.exposure_id')}, rewards AS ("
        f"SELECT exposure_id, sum({metric.amount}) AS reward FROM taken WHERE type = $type GROUP BY exposure_id) "
        f"SELECT hash(user_key) AS user, {segment} AS segment, list_position($names, arm) - 1 AS arm, "
        "coalesce(reward, 0)::DOUBLE AS reward FROM shown LEFT JOIN rewards USING (exposure_id)",
        {"window": WINDOW, "type": metric.type, "names": names},
    ).fetchnumpy()
    users, segments = rows["user"], rows["segment"]
    arms, rewards = (rows[name][:, None] for name in ("arm", "reward"))
    wanted = np.array([names.index(one.arm) for one in given])[segments][:, None]
    logged = np.array([arm.share for arm in experiment.arms])[arms]
    cells = [segments[:, None] * len(names) + of for of in (arms, wanted)]
    return _estimates(rewards, logged, (arms == wanted).astype(np.float64), users, *cells, positions=None)


def without_new_items(log: duckdb.DuckDBPyConnection, metric: Metric) -> Estimates:
    """Estimate Recommend's answers without positions for new items, by the item-position model.

    Only answers of the most frequent length count, before the first position where no item could stay.
    Raises: NoSupport; InvalidRequest, see `results`.
    """
    check_metrics(log, [metric])
    log.execute(
        "CREATE OR REPLACE TEMP TABLE drawn AS SELECT row_number() OVER () - 1 AS n, * FROM ("
        "SELECT user_key, exposure_id, shown, item_ids, propensities, sources, mode(len(item_ids)) OVER () AS length "
        "FROM exposures WHERE surface = 'recommend' "
        f"AND context['surface'] IS DISTINCT FROM '{CONSOLE}' AND first_position = 1 AND len(teams) = 0 "
        "AND list_min(propensities) < 1 AND sources IS NOT NULL) WHERE len(item_ids) = length;"
        "CREATE OR REPLACE TEMP VIEW shown AS SELECT * FROM drawn"
    )
    users = log.execute("SELECT hash(user_key) AS user FROM shown ORDER BY n").fetchnumpy()["user"]
    if not len(users):
        raise NoSupport(
            "every logged propensity is 1: no answer had a position for new items, and a log without chance says "
            "nothing of other answers. Set FRESHET_GATEWAY_NEW_ITEM_SHARE, or an arm's new_item_share"
        )
    slots = log.execute(
        f"SELECT unnest(propensities[:{MAX_POSITIONS}])::DOUBLE AS logged, "
        f"unnest(sources[:{MAX_POSITIONS}]) = 'new' AS is_new FROM shown ORDER BY n"
    ).fetchnumpy()
    logged, is_new = (np.asarray(slots[name]).reshape(len(users), -1) for name in ("logged", "is_new"))
    rewards = np.zeros_like(logged)
    found = log.execute(
        f"{attributed('s.n, list_position(s.item_ids, i.item_id) - 1 AS slot')} "
        f"SELECT n, slot, sum({metric.amount})::DOUBLE AS reward FROM taken "
        "WHERE type = $type AND slot BETWEEN 0 AND $last GROUP BY ALL",
        {"window": WINDOW, "type": metric.type, "last": logged.shape[1] - 1},
    ).fetchnumpy()
    rewards[found["n"], found["slot"]] = found["reward"]
    # A pinned item has propensity 1 and stays. Another ordinary item stays if no new item stands before it.
    target = ((logged == 1) | ~np.logical_or.accumulate(is_new, axis=1)).astype(np.float64)
    most = int(np.argmin([*target.any(axis=0), False]))
    kinds = 2 * np.arange(most)
    cells = kinds + is_new[:, :most], np.broadcast_to(kinds, (len(users), most))
    return _estimates(rewards[:, :most], logged[:, :most], target[:, :most], users, *cells, positions=most)


def _estimates(
    rewards: Array,
    logged: Array,
    target: Array,
    users: npt.NDArray[np.integer],
    cells: npt.NDArray[np.integer],
    wanted: npt.NDArray[np.integer],
    *,
    positions: int | None,
) -> Estimates:
    """Return the estimates. cells, wanted: reward model's cells of the items that the log and the other policy show."""
    if (num_users := len(np.unique(users))) < MIN_USERS:
        raise NoSupport(f"{num_users} users; allowed: {MIN_USERS} at least, below which intervals say nothing")
    for number, columns in enumerate(zip(logged.T, target.T, strict=True), 1):
        shown, other = (column[:, None] for column in columns)
        weight = ips(np.ones_like(shown), shown, other, users)
        if abs(weight.mean - 1) > _REFUSED_BEYOND * (weight.high - weight.mean):
            where = "" if positions is None else f" at position {number}"
            raise NoSupport(
                f"the mean weight{where} is {weight.mean:.3f} [{weight.low:.3f}, {weight.high:.3f}], and 1 where the "
                "propensities are right: exposures are lost, or the policy changes how often people come back"
            )
    half = (users % 2).astype(np.intp)
    num_cells = int(max(cells.max(), wanted.max())) + 1
    means = np.zeros((2, num_cells))
    for fold in range(2):
        rest = half != fold
        counts = np.bincount(cells[rest].ravel(), minlength=num_cells)
        sums = np.bincount(cells[rest].ravel(), weights=rewards[rest].ravel(), minlength=num_cells)
        means[fold] = sums / np.maximum(1, counts)
    predicted, expected = means[half[:, None], cells], means[half[:, None], wanted].sum(1)
    given = rewards, logged, target, users
    return Estimates(
        answers=len(rewards),
        users=num_users,
        positions=positions,
        ran=ips(rewards, logged, logged, users),
        other={
            "IPS": ips(*given),
            "self-normalised IPS": snips(*given),
            "doubly robust": doubly_robust(*given, predicted=predicted, expected=expected),
        },
    )
