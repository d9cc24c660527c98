"""Bytes and processor time by the number of items, measured at two sizes and fitted; predictions for two others.

The predictions stand in the report before the sizes that they speak of are measured: `check` measures those and adds
them with the error, and leaves the fit alone. Beside it: what a user takes in Redis, and a record on the wire.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.native.threads import set_compute_threads
from services.algorithms.scoring.states import QueryStates
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.large.catalogue import enlarged, queries
from services.offline.evaluation.large.rows import Serve, Served
from services.offline.evaluation.scale.held import gateway_mib, names_mib
from services.offline.evaluation.scale.records import record_bytes, user_bytes
from services.offline.evaluation.scale.unit_costs import fit

FITTED, CHECKED = (3_706, 1_000_000), (300_000, 10_000_000)
_QUICK_FITTED, _QUICK_CHECKED = (1_000, 20_000), (5_000, 40_000)
EXACT, CODES = "exact", "quantized_tangents(2000)"
# Quantity -> what it is, and the power of the number of items that it grows with. The codes: cells and the items in
# each grow with the root, and so do the items touched (56,000 of 100,000; 236,000 of 1,000,000; 343,000 of 2,000,000).
QUANTITIES = {
    "exact_ms": ("a Search by `exact`, processor ms of candidates", 1.0),
    "codes_ms": (f"a Search by `{CODES}`, processor ms of candidates", 0.5),
    "candidates_mib": ("candidates with both, resident MiB after searches", 1.0),
    "candidates_peak_mib": ("the same at most, at a first start", 1.0),
    "gateway_mib": ("what the gateway holds of the catalogue, MiB", 1.0),
    "names_mib": ("item ids with their numbers (encoder, refresher), MiB", 1.0),
}
_FORMS = {1.0: "items", 0.5: "√items"}
_QUERIES, _WARM_UP = 128, 16
_TURNS, _TURN_S, _LEAST = 12, 0.5, 4


def run(request: Request, *, bundle: Path, check: bool, serve: Serve) -> Report:
    """Measure and fit; or, with `check`, measure what the stored report predicts. Writes scale.{md,json}.

    Raises: BundleError; ValueError where there is no stored report to check.
    """
    began = time.perf_counter()
    set_compute_threads(1)
    trained = load_bundle(bundle)
    if check:
        return written(request, _checked(request, trained, _stored(request.out), serve), page)
    rows = _measured(request, trained, _QUICK_FITTED if request.quick else FITTED, serve)
    fits = {name: fit({row["num_items"]: row[name] for row in rows}, power) for name, (_, power) in QUANTITIES.items()}
    request.say("users in Redis, records")
    report = report_of("scale", request, rows, began) | {
        "path_items": trained.num_items,
        "item_bytes": _item_bytes(trained),
        "fits": {name: {"at_zero": one.at_zero, "slope": one.slope, "power": one.power} for name, one in fits.items()},
        "predictions": [
            {"quantity": name, "num_items": size, "predicted": round(one(size), 3), "measured": None, "error": None}
            for size in (_QUICK_CHECKED if request.quick else CHECKED)
            for name, one in fits.items()
        ],
        "users": user_bytes(trained, num_users=200 if request.quick else 2_000),
        "records": record_bytes(trained),
        "check": None,
    }
    return written(request, report, page)


def page(report: Report) -> str:
    """scale.md of a report."""
    fits = [
        {"says": QUANTITIES[name][0], "of": _FORMS[one["power"]], "a": one["at_zero"], "b": one["slope"]}
        for name, one in report["fits"].items()
    ]
    return filled(
        Path(__file__).parent / "page.template.md",
        **{"remark": ""}
        | report
        | {
            "fits": fits,
            "predictions": [row | {"says": QUANTITIES[row["quantity"]][0]} for row in report["predictions"]],
            "largest": max(abs(row["error"] or 0) for row in report["predictions"]),
            "unchecked": report["check"] is None,
        },
    )


def _item_bytes(trained: Bundle) -> dict[str, int]:
    """Of one item: its state, its row in the encoder's table, its neighbours."""
    states, neighbours = trained.item_states, trained.neighbours
    state = states.components[0].nbytes + (0 if states.gate is None else states.gate[0].nbytes)
    near = 0 if neighbours is None else neighbours.nbytes // trained.num_items
    return {"state": state, "encoder": 4 * trained.encoder.width, "neighbours": near}


def _stored(folder: Path) -> Report:
    path = folder / "scale.json"
    if not path.exists():
        raise ValueError(f"check=True but {path} is not there; allowed: after a run without --check")
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def _checked(request: Request, trained: Bundle, report: Report, serve: Serve) -> Report:
    began = time.perf_counter()
    sizes = sorted({row["num_items"] for row in report["predictions"]})
    measured = _measured(request, trained, sizes, serve)
    fresh = report_of("scale", request, [], began)
    return compared(report, measured) | {"check": {name: fresh[name] for name in ("command", "machine", "seconds")}}


def compared(report: Report, measured: Sequence[dict[str, Any]]) -> Report:
    """The report with these rows beside what it predicted, and the error of each; the fit and its rows stay."""
    rows = {row["num_items"]: row for row in measured}
    predictions = []
    for row in report["predictions"]:
        found = rows[row["num_items"]][row["quantity"]]
        predictions.append(row | {"measured": found, "error": round(row["predicted"] / found - 1, 3)})
    kept = [row for row in report["rows"] if row["num_items"] not in rows]
    return report | {"rows": [*kept, *measured], "predictions": predictions}


def _measured(request: Request, trained: Bundle, sizes: Sequence[int], serve: Serve) -> list[dict[str, Any]]:
    asked = queries(trained, 16 if request.quick else _QUERIES, seed=request.seed)
    each = [asked.take([number]) for number in range(len(asked))]
    rows = []
    for size in sizes:
        load = os.getloadavg()[0]
        with TemporaryDirectory() as name:
            request.say(f"{size:,} items")
            folder = enlarged(trained, size, Path(name) / "bundle", seed=request.seed).path
            row: dict[str, Any] = {"num_items": size, "load": round(load, 2)}
            with serve(folder, (EXACT, CODES)) as service:
                for quantity, algorithm in (("exact_ms", EXACT), ("codes_ms", CODES)):
                    request.say(f"{size:,} items, {algorithm}")
                    row[quantity] = round(_processor_ms(service, each, algorithm, 0.1 if request.quick else _TURN_S), 3)
                row["candidates_mib"] = round(service.resident_bytes() / 2**20, 1)
                row["candidates_peak_mib"] = round(service.peak_bytes() / 2**20, 1)
                row["start_s"] = round(service.start_s, 1)
            request.say(f"{size:,} items, what other processes hold")
            for quantity, held in (("gateway_mib", gateway_mib), ("names_mib", names_mib)):
                # A process of its own: what this one has freed before would hide part of it.
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row[quantity] = round(pool.apply(held, (folder, trained.titles)), 2)
        rows.append(row)
    return rows


def _processor_ms(service: Served, each: Sequence[QueryStates], algorithm: str, turn_s: float) -> float:
    """Of the service's process per search, one at a time: the lower quartile of turns, since other work on the machine
    takes cache from some of them."""
    for query in each[:_WARM_UP]:
        service.search(query, algorithm)
    turns = []
    for turn in range(_TURNS):
        number, began = 0, service.processor_s()
        while (spent := service.processor_s() - began) < turn_s or number < _LEAST:
            service.search(each[(turn * _LEAST + number) % len(each)], algorithm)
            number += 1
        turns.append(1_000 * spent / number)
    return quantiles(turns)[0]
