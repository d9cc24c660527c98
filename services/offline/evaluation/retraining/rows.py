"""`freshet bench retraining`: what the gate says of models of which is known whether they should serve.

Simulated people, whose interests drift while items and people are new every day. The serving model learnt what was
before the first moment; each other one what was before a second moment, and all are judged by the week after. One is
trained as it should be. Two are spoilt: every label shuffled, and only the first events of everybody, which was meant
to make it worse for new people alone. Whoever is held back, and why, is the row.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import load_bundle
from services.offline.datasets import Interactions
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.retraining.gate import judge
from services.offline.training.fit import NONE
from services.offline.training.run import run_training

# Fixed before anything was measured. People come until the 126th day, so there are new ones throughout.
WORLD = SimulatorConfig(num_users=3_000, num_items=2_000, mean_events_per_user=100.0, days=180, drift=0.3)
SERVING_DAYS, LEARNT_DAYS, JUDGED_DAYS = 60, 100, 7
FIRST_EVENTS = 10
_DAY_S = 86_400
_PRESET = {"preset_name": "quick", "head": "mol", "epochs": 3}

Row = dict[str, Any]
Spoil = Callable[[Interactions, np.random.Generator], Interactions]


def shuffled(data: Interactions, rng: np.random.Generator) -> Interactions:
    """Every event has some event's item."""
    return replace(data, items=rng.permutation(data.items))


def first_shuffled(data: Interactions, rng: np.random.Generator) -> Interactions:
    """Everybody's first events have the items of other people's first events; later ones are as they were."""
    order, offsets = data.by_user()
    place = np.empty(len(data), dtype=np.int64)
    place[order] = np.arange(len(data)) - np.repeat(offsets[:-1], np.diff(offsets))
    items, first = data.items.copy(), np.flatnonzero(place < FIRST_EVENTS)
    items[first] = items[rng.permutation(first)]
    return replace(data, items=items)


MODELS: dict[str, Spoil] = {
    "newer events": lambda data, rng: data,
    "labels shuffled": shuffled,
    "first events shuffled": first_shuffled,
}


def run(request: Request, *, seeds: int = 3, world: SimulatorConfig = WORLD, epochs: int = 3) -> Report:
    """Measure; writes retraining.{md,json}."""
    began = time.perf_counter()
    rows: list[Row] = []
    for seed in range(request.seed, request.seed + seeds):
        with tempfile.TemporaryDirectory(prefix="freshet-retraining-") as folder:
            rows += _rows(request, simulate(replace(world, seed=seed)), Path(folder), seed, epochs)
    report = report_of("retraining", request, rows, began)
    days = {"serving_days": SERVING_DAYS, "learnt_days": LEARNT_DAYS, "judged_days": JUDGED_DAYS}
    return written(request, report | days | {"world": asdict(world), "first_events": FIRST_EVENTS}, page)


def page(report: Report) -> str:
    """retraining.md of a report; a `remark` is what a person adds to it."""
    rows = [row | {"why": _short(row["held_back"])} for row in report["rows"]]
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report, "rows": rows})


def _short(held_back: Sequence[str]) -> str:
    more = f", and {len(held_back) - 1} more reasons" if len(held_back) > 1 else ""
    return f"{held_back[0]}{more}" if held_back else "–"


def _rows(request: Request, data: Interactions, folder: Path, seed: int, epochs: int) -> list[Row]:
    start = int(data.timestamps[0])
    first, end = (
        int(np.searchsorted(data.timestamps, start + days * _DAY_S))
        for days in (LEARNT_DAYS, LEARNT_DAYS + JUDGED_DAYS)
    )
    known = int(np.searchsorted(data.timestamps, start + SERVING_DAYS * _DAY_S))
    seen = data.select(slice(0, end))
    serving = _trained(request, "serving", data.select(slice(0, known)), folder, seed, epochs)
    rows = []
    for name, spoil in MODELS.items():
        learnt = spoil(data.select(slice(0, first)), np.random.default_rng(seed))
        new = _trained(request, name, learnt, folder, seed, epochs)
        verdict = judge(load_bundle(serving), load_bundle(new), seen, first)
        by_name = {(one.question, one.stratum): one for one in verdict.compared}
        rows.append(
            {
                "seed": seed,
                "model": name,
                "passes": verdict.passes,
                "held_back": list(verdict.held_back),
                "overall": _cell(by_name.get(("all", "all"))),
                "new_people": _cell(by_name.get(("user", "new"))),
                "known_people": _cell(by_name.get(("user", "in training"))),
                "new_items": _cell(by_name.get(("item", "new to it"))),
                "compared": [asdict(one) for one in verdict.compared],
            }
        )
        shutil.rmtree(new)
    return rows


def _cell(one: Any) -> str | None:
    """Hit rates of the serving and the new model."""
    return None if one is None else f"{one.serving:.3f} → {one.new:.3f}"


def _trained(request: Request, name: str, data: Interactions, folder: Path, seed: int, epochs: int) -> Path:
    request.say(f"seed {seed}: training {name} on {len(data):,} events")
    out = folder / name.replace(" ", "-")
    run_training(
        out=out,
        interactions=data.keep_frequent(min_per_item=1),
        split=NONE,
        seed=seed,
        **{**_PRESET, "epochs": epochs},  # type: ignore[arg-type]
    )
    return out
