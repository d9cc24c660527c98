"""`freshet bench actions`: what an action changes for its person, and whether knowing it finds what they like next."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import Bundle, BundleError, load_bundle
from services.algorithms.encoding.aversion import DECAY, STEP
from services.algorithms.native.threads import set_compute_threads
from services.offline.datasets import Interactions, load_dataset
from services.offline.evaluation.actions.next_liked import Asked, asked_after, ranks_by_arm
from services.offline.evaluation.actions.pairs import ACTIONS, changes
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.engine.intervals import paired_difference
from services.offline.evaluation.engine.metrics import gains
from services.offline.evaluation.engine.served_states import Person, stored_events

_PAIRS, _EVENTS = 500, 8_000
_BASE = "all events alike"


def run(request: Request, *, bundles: Sequence[Path], interactions: Interactions | None = None) -> Report:
    """Measure on bundles of one data set that were trained before a time; writes actions.{md,json}.

    Models that read items and times alone and models that read actions stand beside each other.

    `interactions` replaces the set that the bundles name. Raises: BundleError for bundles of another split or set.
    """
    began = time.perf_counter()
    set_compute_threads(1)
    opened = [load_bundle(path) for path in bundles]
    name, events = _trained_on(opened)
    data = load_dataset(name) if interactions is None else interactions
    rows = []
    for reads, models in _by_what_they_read(opened).items():
        rows += [{"model": reads, **row} for row in _pairs(request, models[0], data, 50 if request.quick else _PAIRS)]
    asked = asked_after(data, events, 200 if request.quick else _EVENTS, request.seed)
    rows += _next(request, opened, asked)
    report = report_of("actions", request, rows, began)
    report |= {"data": data.name, "bundles": len(opened), "step": STEP, "decay": DECAY}
    return written(request, report, page)


def page(report: Report) -> str:
    """actions.md of a report."""
    parts = {part: [row for row in report["rows"] if row["part"] == part] for part in ("pairs", "next")}
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report, **parts})


def _trained_on(bundles: Sequence[Bundle]) -> tuple[str, int]:
    """The set's name, and how many of its first events were trained on."""
    said = {(one.manifest.data.get("name"), one.manifest.data.get("events")) for one in bundles}
    splits = {one.manifest.data.get("split") for one in bundles}
    if len(said) != 1 or splits != {"time"}:
        found = f"{sorted(map(str, said))} by {sorted(map(str, splits))}"
        raise BundleError(f"bundles of {found}; allowed: one data set, split by time")
    return said.pop()  # type: ignore[return-value]


def _by_what_they_read(bundles: Sequence[Bundle]) -> dict[str, list[Bundle]]:
    found: dict[str, list[Bundle]] = {}
    for one in bundles:
        found.setdefault("actions, too" if one.encoder.actions else "items and times", []).append(one)
    return found


def _pairs(request: Request, bundle: Bundle, data: Interactions, count: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(request.seed)
    order, offsets = data.by_user()
    users = generator.choice(data.num_users, min(count, data.num_users), replace=False)
    people = [
        Person(data.user_ids[user], stored_events(data, order[offsets[user] : offsets[user + 1]]))
        for user in users.tolist()
    ]
    items = generator.integers(0, bundle.num_items, len(people))
    rows = []
    for learns in (False, True):
        request.say(f"{len(people)} people and items, PEFA {'on' if learns else 'off'}")
        for action, found in changes(bundle, people, items, learns=learns).items():
            moved = found.after - found.before
            rows.append(
                {
                    "part": "pairs",
                    "action": action,
                    "type": ACTIONS[action][0],
                    "pefa": "on" if learns else "off",
                    "pairs": len(moved),
                    "before": round(float(found.before.mean()), 1),
                    "falls": round(float((moved > 0).mean()), 4),
                    "rises": round(float((moved < 0).mean()), 4),
                    "mean": round(float(moved.mean()), 1),
                    "median": round(float(np.median(moved)), 1),
                    "states_unchanged": found.unchanged,
                }
            )
    return rows


def _next(request: Request, bundles: Sequence[Bundle], asked: Asked) -> list[dict[str, Any]]:
    by_arm: dict[str, list[npt.NDArray[np.int64]]] = {}
    for number, bundle in enumerate(bundles, 1):
        for arm, ranks in ranks_by_arm(bundle, asked, lambda arm, n=number: request.say(f"model {n}: {arm}")).items():  # type: ignore[misc]
            by_arm.setdefault(arm, []).append(ranks)
    rows = []
    base_arm = _BASE if _BASE in by_arm else next(iter(by_arm))
    everything = np.ones(len(asked.rows), dtype=bool)
    for targets, chosen in (("liked", asked.is_liked), ("disliked", asked.is_disliked), ("any", everything)):
        if not chosen.any():
            continue
        users = asked.data.users[asked.rows[chosen]]
        base = np.array([ranks[chosen] <= 10 for ranks in by_arm[base_arm]], np.float64)
        for arm, ranks_of in by_arm.items():
            ranks = np.array([one[chosen] for one in ranks_of]) - 1
            hits = gains(ranks, "hr@10")
            against = paired_difference(hits, base, users=users, seed=request.seed) if arm != base_arm else None
            rows.append(
                {
                    "part": "next",
                    "targets": targets,
                    "arm": arm,
                    "events": int(chosen.sum()),
                    "models": len(ranks),
                    "hr_10": round(float(hits.mean()), 4),
                    "hr_50": round(float(gains(ranks, "hr@50").mean()), 4),
                    "ndcg_10": round(float(gains(ranks, "ndcg@10").mean()), 4),
                    "difference": None
                    if against is None
                    else [round(one, 5) for one in (against.mean, against.low, against.high)],
                }
            )
    return rows
