"""A benchmark's request and its report: plain values, written as a page for people and as JSON for machines."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.offline.evaluation.common.tables import filled, machine, tables

Report = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for: `how` is the command line, to stand on the page; `out` is where pages and plots go."""

    how: str
    out: Path
    quick: bool
    seed: int
    say: Say = lambda line: None


def report_of(name: str, request: Request, rows: list[dict[str, Any]], began: float) -> Report:
    """The frame that every report has; `began`: time.perf_counter() when measuring began."""
    return {
        "benchmark": name,
        "command": request.how,
        "machine": machine(),
        "quick": request.quick,
        "seed": request.seed,
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows,
    }


def written(
    request: Request, report: Report, page: Callable[[Report], str], plot: Callable[[Report, Path], None] | None = None
) -> Report:
    """Write NAME.md and NAME.json, NAME being the report's benchmark, and its plots; returns the report."""
    name = report["benchmark"]
    request.out.mkdir(parents=True, exist_ok=True)
    if plot is not None:
        plot(report, request.out)
    (request.out / f"{name}.md").write_text(page(report).rstrip() + "\n", encoding="utf-8")
    (request.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def plain_page(template: Path, report: Report) -> str:
    """A page whose rows say everything by themselves: `$tables` and the report's own values.

    A `remark` is what a person adds to the stored report.
    """
    return filled(template, **{"remark": "", "tables": tables(report["rows"])} | report)
