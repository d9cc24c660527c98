"""Do the missing runs of the comparison, write a page of results and a plot of learning curves."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.report import (
    Report,
    Request,
    commit,
    filled,
    report_of,
    written,
)
from services.offline.evaluation.quality import table
from services.offline.evaluation.quality.arms import ARMS

Row = Mapping[str, Any]

_FOLDER = Path(__file__).parent


def quality(
    request: Request, *, data: Sequence[table.MeasuredData], store: Path, seeds: int | None, hours: float | None
) -> Report:
    """Compare encoders and heads with tuned baselines; writes quality.{md,json,png}. It skips finished runs in `store`,
    and complete splits of the present quality.json; no run begins after `hours`.

    Raises: DatasetUnavailableError for a set that is not on this machine.
    """
    began = time.perf_counter()
    written_before = request.out / "quality.json"
    earlier = json.loads(written_before.read_text(encoding="utf-8")) if written_before.exists() else {"sections": []}
    work = table.Work(
        store=store,
        say=request.say,
        until=None if hours is None else time.monotonic() + 3600 * hours,
        earlier=[{"machine": earlier["machine"], **section} for section in earlier["sections"]],
        commit=commit(),
    )
    table.measure(work, data, seeds=seeds)
    request.say("intervals")
    found = table.report(work, data, seeds=seeds)
    rows = [row for section in found["sections"] for row in section["rows"]]
    report = report_of("quality", request, rows, began) | found
    return written(request, report, page, lambda report, out: plot_curves(report, out / "quality.png"))


def page(report: Mapping[str, Any]) -> str:
    """Return quality.md of a report (`table.report`) with `command` and `machine`."""
    sections = report["sections"]
    done = sum(section["finals"]["done"] for section in sections)
    expected = sum(section["finals"]["expected"] for section in sections)
    progress = "The table is complete." if done >= expected else f"{done} of {expected} final runs are done so far."
    values = {
        "tuning_minutes": table.TUNING_SECONDS / 60,
        "progress": progress,
        "sections": [_section(section) for section in sections if section["rows"]],
    }
    return filled(_FOLDER / "page.template.md", **{**report, **values})


_PANELS_IN_A_ROW = 4


def plot_curves(report: Mapping[str, Any], path: Path) -> None:
    """Plot validation NDCG@10 against processor seconds of training, by split."""
    sections = [section for section in report["sections"] if section["curves"]]
    rows = max(1, -(-len(sections) // _PANELS_IN_A_ROW))
    with panels(path, rows, _PANELS_IN_A_ROW, size=(4.2, 3.6), dpi=80) as drawn:
        for unused in drawn.flat[len(sections) :]:
            unused.set_axis_off()
        for panel, section in zip(drawn.flat, sections, strict=False):
            for number, (name, arm) in enumerate(ARMS.items()):
                for seed, curve in enumerate(section["curves"].get(name, [])):
                    style = {"color": f"C{number}", "lw": 1, "label": arm.title if seed == 0 else None}
                    panel.plot(*zip(*curve, strict=True), "-" if arm.is_mixture else "--", **style)
            title = f"{section['data']}\n{section['split']}"
            titled(panel, title, xlabel="processor seconds", ylabel="validation NDCG@10")


def _section(section: Row) -> str:
    order, order_text = section["order"], ""
    commits = ", ".join(section.get("commits", ()))
    if order is not None:
        order_text = (
            f" Shuffle test: {order['verdict']} (next-item hits {order['lift']:g} × shuffled, z {order['z']:g})."
        )
    ordered = sorted(section["rows"], key=lambda row: -row["ndcg@10"])
    rows = {
        "told": order_text,
        "at": f", at commit {commits}" if commits else "",
        "rows": [
            _minutes(row) | {"name": f"**{row['title']}**" if row["arm"] in ARMS else row["title"]} for row in ordered
        ],
        "verdicts": [
            verdict
            for verdict in section["verdicts"]
            if verdict["metric"] == "ndcg@10" and verdict["question"] != "with item neighbours minus without"
        ],
    }
    return filled(_FOLDER / "section.template.md", **{**section, **rows})


def _minutes(row: Row) -> dict[str, Any]:
    return {**row, "minutes": row["cpu_seconds"] / 60}
