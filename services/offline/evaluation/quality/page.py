"""Do the missing runs of the comparison, write a page of results and a plot of learning curves."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.report import Report, Request, commit, filled, report_of, written
from services.offline.evaluation.quality import table
from services.offline.evaluation.quality.arms import ARMS


def quality(
    request: Request, *, data: Sequence[table.MeasuredData], store: Path, seeds: int | None, hours: float | None
) -> Report:
    """Compare encoders and heads with tuned baselines; write quality.{md,json,png}.

    Finished runs in `store` and complete splits in the existing quality.json are skipped. No run begins after `hours`.
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
    if seeds is not None:
        data = [replace(one, seeds=seeds) for one in data]
    table.measure(work, data)
    request.say("intervals")
    found = table.report(work, data)
    rows = [row for section in found["sections"] for row in section["rows"]]
    report = report_of("quality", request, rows, began) | found
    return written(request, report, page, lambda report, out: plot_curves(report, out / "quality.png"))


def page(report: Mapping[str, Any]) -> str:
    """Return quality.md of a report (`table.report`) with `command`."""
    done, expected = (sum(one["finals"][part] for one in report["sections"]) for part in ("done", "expected"))
    values = {"tuning_minutes": table.TUNING_SECONDS / 60, "done": done, "expected": expected, "arms": ARMS}
    return filled(Path(__file__).with_name("page.md.j2"), **{**report, **values})


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
