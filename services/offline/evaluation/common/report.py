"""A benchmark's request, and its report as a page and as JSON."""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, Undefined
from jinja2.meta import find_undeclared_variables

Row = Mapping[str, Any]

_MISSING = "–"


def filled(template: Path, **values: Any) -> str:
    """Return the page of a jinja2 template, which shows values by `cell`.

    A missing part of a value is shown as "–". Raises: KeyError for a missing value.
    """
    text = template.read_text(encoding="utf-8")
    if missing := find_undeclared_variables(_TEMPLATES.parse(text)) - {*values, *_TEMPLATES.globals}:
        raise KeyError(f"{template} needs {', '.join(sorted(missing))}")
    page = _TEMPLATES.from_string(text).render(values)
    return re.sub(r"\n{3,}", "\n\n", page).strip("\n") + "\n"


def cell(value: Any, spec: str = "") -> str:
    """Return a value as a page shows it. None becomes "–"; a list of texts is joined.

    `spec` is Python's format specification, or one of these: `short` gives three digits; `share` gives four digits
    without a leading zero; `interval` and `+interval` (with signs) format [mean, low, high]. A prefix `M` or `G`
    divides by a million or a billion. A prefix `±` gives " ± x", and "" for None.
    """
    if value is None or isinstance(value, Undefined):
        return "" if spec.startswith("±") else _MISSING
    if spec.startswith("±"):
        return f" ± {cell(value, spec[1:])}"
    if spec.endswith("interval"):
        mean, low, high = (format(one, f"{spec[:-8]}.4f") for one in value)
        return f"{mean} [{low}, {high}]"
    if spec == "share":
        return f"{value:.4f}".replace("0.", ".", 1)
    if spec == "short":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if spec[:1] in ("M", "G"):
        return format(value / {"M": 1e6, "G": 1e9}[spec[0]], spec[1:])
    if spec:
        return format(value, spec)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(one)}" for name, one in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def tables(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table per set of columns."""
    lines: list[str] = []
    for names in dict.fromkeys(map(tuple, rows)):
        shown = [[name.replace("_", " ") for name in names]]
        shown += [[cell(row[name]) for name in names] for row in rows if tuple(row) == names]
        header, *body = ["| " + " | ".join(line) + " |" for line in shown]
        lines += [header, "|" + "---|" * len(names), *body, ""]
    return lines


_TEMPLATES = Environment(
    undefined=ChainableUndefined, finalize=cell, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)
_TEMPLATES.filters["cell"] = cell
_TEMPLATES.globals["tables"] = tables


def machine() -> str:
    """Return the processor and the cores in use."""
    info = Path("/proc/cpuinfo")
    names = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in names if "model name" in line), platform.processor())
    return f"{os.cpu_count()} cores ({model})"


def commit() -> str | None:
    """Return the checkout's commit, with `+` if files differ; None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


Report = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`how`: the command line, for the page; `out`: the folder of pages and plots."""

    how: str
    out: Path
    quick: bool
    seed: int
    say: Say = lambda line: None


def report_of(name: str, request: Request, rows: list[dict[str, Any]], began: float) -> Report:
    """Return the fields of every report; `began`: time.perf_counter() at the start."""
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
    """Write NAME.md, NAME.json and plots, where NAME is the report's benchmark; return the report."""
    name = report["benchmark"]
    request.out.mkdir(parents=True, exist_ok=True)
    if plot is not None:
        plot(report, request.out)
    (request.out / f"{name}.md").write_text(page(report).rstrip() + "\n", encoding="utf-8")
    (request.out / f"{name}.json").write_text(stored(report), encoding="utf-8")
    return report


def stored(report: Report) -> str:
    """Return the report as JSON, one line per value and per row."""
    values = []
    for name, value in report.items():
        shown = json.dumps(value)
        if isinstance(value, list) and value:
            shown = "[\n  " + ",\n  ".join(json.dumps(one) for one in value) + "\n ]"
        values.append(f" {json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(values) + "\n}\n"
