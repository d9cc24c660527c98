"""`freshet bench paper table-3` as one run: rows, page and plot. Every other subject has its `run` in its folder."""

import time
from collections.abc import Sequence
from pathlib import Path

from services.offline.evaluation.common.report import Report, Request, report_of, written
from services.offline.evaluation.quality import page, table


def quality(
    request: Request, *, data: Sequence[table.MeasuredData], store: Path, seeds: int | None, hours: float | None
) -> Report:
    """Encoders and heads beside tuned baselines; writes quality.{md,json,png}. Finished runs in `store` are not done
    again; no run begins after `hours`. Raises: DatasetUnavailableError for a set that is not on this machine.
    """
    began = time.perf_counter()
    work = table.Work(store=store, say=request.say, until=None if hours is None else time.monotonic() + 3600 * hours)
    table.measure(work, data, seeds=seeds)
    request.say("intervals")
    found = table.report(work, data, seeds=seeds)
    rows = [row for section in found["sections"] for row in section["rows"]]
    report = report_of("quality", request, rows, began) | found
    return written(request, report, page.page, lambda report, out: page.plot_curves(report, out / "quality.png"))
