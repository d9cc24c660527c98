"""Benchmark rows as Markdown pages: one table per shape and batch, with the caveats that belong beside the numbers.

It formats what it is given; it measures nothing.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.offline.evaluation.floors import Rates
from services.offline.evaluation.retrieval import TRANSCRIPTION

Row = dict[str, Any]

_MISSING = "–"


def retrieval_page(rows: Sequence[Row], growth: Sequence[Row], left_out: Sequence[str], rates: Rates, how: str) -> str:
    """docs/benchmarks/retrieval.md."""
    lines = [
        "# Retrieval: speed, recall and proof",
        "",
        "How fast is each algorithm of the papers beside a straightforward PyTorch transcription of it, and what are "
        f"its answers worth? Measured by `{how}` on {machine()}.",
        "",
        f"The machine's rates with {rates.threads} threads: {rates.multiply_adds / 1e9:.0f} billion float32 "
        f"multiply-adds, {rates.exponentials / 1e9:.2f} billion exponentials and {rates.bytes_read / 1e9:.1f} GB read "
        "a second. A floor is the larger of arithmetic and memory; exact strategies are held against brute force's. "
        "Milliseconds are medians per batch, on a shared machine: trust ratios more. Recall and the labels' hit rate "
        "are relative to the exact top 100.",
        "",
        "![speed against recall](retrieval.png)",
        "",
    ]
    for shape, num_items, batch in _groups(rows):
        part = [row for row in rows if (row["shape"], row["batch"]) == (shape, batch)]
        lines += [f"## {shape}: {num_items:,} items, batch {batch}", "", *_retrieval_table(part), ""]
    if growth:
        lines += ["## Growth: from 10^4 to 10^7 items of the Books shape", "", *_growth_table(growth), ""]
        lines += [f"Left out: {sentence}." for sentence in left_out]
        lines += ["", "![growth](growth.png)", ""]
    return "\n".join(lines)


def plain_page(title: str, question: str, rows: Sequence[Row], how: str) -> str:
    """A page with one table per set of columns, for benchmarks whose rows say everything by themselves."""
    lines = [f"# {title}", "", f"{question} Measured by `{how}` on {machine()}.", ""]
    columns: list[tuple[str, ...]] = []
    for row in rows:
        if tuple(row) not in columns:
            columns.append(tuple(row))
    for names in columns:
        lines += [*markdown(names, ([_shown(row[name]) for name in names] for row in rows if tuple(row) == names)), ""]
    return "\n".join(lines)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [
        "| " + " | ".join(name.replace("_", " ") for name in header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def machine() -> str:
    """The processor and the number of cores in use."""
    info = Path("/proc/cpuinfo")
    names = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in names if "model name" in line), platform.processor())
    return f"{os.cpu_count()} cores ({model})"


def _groups(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    found = dict.fromkeys((row["shape"], row["num_items"], row["batch"]) for row in rows)
    return sorted(found, key=lambda group: (group[1], group[2]))


def _retrieval_table(rows: Sequence[Row]) -> list[str]:
    header = (
        "algorithm",
        "ms",
        "p95",
        "× transcribed brute force",
        "× its transcription",
        "recall@100",
        "relative HR@100",
        "proven exact",
        "scored in full",
        "× floor",
        "bytes/item",
    )
    return markdown(header, (_retrieval_line(row) for row in rows))


def _retrieval_line(row: Row) -> list[str]:
    touched = row["touched"] or {}
    return [
        row["algorithm"] if row["algorithm"].startswith(TRANSCRIPTION) else f"**{row['algorithm']}**",
        _number(row["milliseconds"]),
        _number(row["p95_milliseconds"]),
        _number(row["speedup"]),
        _number(row["speedup_same"]),
        _share(row["recall_100"]),
        _share(row["relative_hr_100"]),
        _MISSING if row["exact"] is None else f"{row['exact']:.0%}",
        f"{touched['full']:,.0f}" if "full" in touched else _MISSING,
        _number(row["floor_ratio"]),
        _MISSING if row["bytes_per_item"] is None else f"{row['bytes_per_item']:,.0f}",
    ]


def _growth_table(rows: Sequence[Row]) -> list[str]:
    header = (
        "algorithm",
        "items",
        "batch",
        "ms",
        "× floor",
        "bytes/item",
        "index MB",
        "process MB",
        "of the pool kept",
    )
    return markdown(
        header,
        (
            [
                row["algorithm"],
                f"{row['num_items']:,}",
                str(row["batch"]),
                _number(row["milliseconds"]),
                _number(row["floor_ratio"]),
                f"{row['bytes_per_item']:,.0f}",
                f"{row['index_bytes'] / 1e6:,.0f}",
                f"{row['process_bytes'] / 1e6:,.0f}",
                _share(row.get("pool_recall")),
            ]
            for row in rows
        ),
    )


def _number(value: float | None) -> str:
    if value is None:
        return _MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.3f}"


def _shown(value: Any) -> str:
    if value is None:
        return _MISSING
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)
