"""`freshet bench shown`: what knowing what was shown is worth, in a simulated world where it matters, and where it does
not."""

import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.engine.intervals import paired_difference
from services.offline.evaluation.shown.world import Outcome, Policy, World, run

SEEDS = 20
# Set before anything was measured.
POLICIES: Mapping[str, Policy] = {
    "hides read as interactions": Policy(knows_actions=False),
    "knows actions": Policy(),
    "… and impressions": Policy(impression_discount=0.05),
    "… and reserves positions": Policy(new_share=0.1),
    "… and both": Policy(impression_discount=0.05, new_share=0.1),
}
# What each row is compared with.
_AGAINST = {
    "knows actions": "hides read as interactions",
    "… and impressions": "knows actions",
    "… and reserves positions": "knows actions",
    "… and both": "knows actions",
}
WORLDS: Mapping[str, World] = {
    "all effects": World(),
    "nobody tires": World(fatigue=0.0),
    "nobody hides": World(hides=0.0),
    "new items are known as well as others": World(new_noise=World().known_noise),
}
_MEASURES = tuple(field.name for field in fields(Outcome))


def measure(request: Request) -> Report:
    """Every policy in every world; writes shown.{md,json}."""
    began = time.perf_counter()
    seeds = range(request.seed, request.seed + (3 if request.quick else SEEDS))
    rows = []
    for name, world in WORLDS.items():
        small = replace(world, people=60, days=6) if request.quick else world
        found: dict[str, list[Outcome]] = {}
        for policy, settings in POLICIES.items():
            request.say(f"{name}: {policy}")
            found[policy] = [run(small, settings, seed) for seed in seeds]
        rows += [_row(name, policy, found) for policy in POLICIES]
    report = report_of("shown", request, rows, began)
    return written(request, report | {"world": asdict(WORLDS["all effects"]), "seeds": len(seeds)}, page)


def page(report: Report) -> str:
    """shown.md of a report; a `remark` is what a person adds to it."""
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report, **report["world"]})


def _row(world: str, policy: str, found: Mapping[str, list[Outcome]]) -> dict[str, Any]:
    row: dict[str, Any] = {"world": world, "policy": policy}
    base = found.get(_AGAINST.get(policy, ""))
    for name in _MEASURES:
        values = np.array([[getattr(one, name) for one in found[policy]]])
        row[name] = round(float(values.mean()), 4)
        if base is not None:
            against = paired_difference(values, np.array([[getattr(one, name) for one in base]]))
            row[f"{name}_difference"] = [round(value, 4) for value in (against.mean, against.low, against.high)]
        else:
            row[f"{name}_difference"] = None
    return row
