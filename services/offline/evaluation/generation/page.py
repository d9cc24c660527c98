"""The page of `freshet bench generation`: what was asked, what came out, and what the figures rest on.

It formats a report of plain values; it measures nothing.
"""

from pathlib import Path
from typing import Any

from services.offline.evaluation.common.tables import filled, markdown
from services.offline.evaluation.generation.rows import FULL, SHORTLIST
from services.offline.evaluation.generation.world import MAKING

_SHOWN = (
    "method", "setting", "union", "ms", "cpu ms", "floor ms", "speedup", "top 10 tokens", "top 10 identifiers",
    "found its own", "extra MB",
)  # fmt: skip


def page(report: dict[str, Any]) -> str:
    """docs/benchmarks/generation.md."""
    growth, lines = report["growth"], []
    if growth is not None:
        lines += [
            f"**The shortlist from {growth['from']:,} to {growth['to']:,} phrases: {growth['cpu ms from']:.2f} to "
            f"{growth['cpu ms to']:.2f} ms of processor time, {growth['ratio']:.2f} times.**",
            "",
        ]
    for size in dict.fromkeys(row["phrases"] for row in report["rows"]):
        part = [row for row in report["rows"] if row["phrases"] == size]
        lines += [f"## {size:,} phrases ({part[0]['weights']})", ""]
        lines += [*markdown(_SHOWN, ([_text(row[name]) for name in _SHOWN] for row in part)), ""]
        lines += _sentence(part)
    counts = ("queries", "answers", "inserts", "deletes")
    return filled(
        Path(__file__).with_name("page.template.md"),
        command=report["command"],
        machine=report["machine"],
        making=MAKING,
        gigabytes=f"{report['rates']['bytes_read'] / 1e9:.1f}",
        tables=lines,
        **report["proof"] | {"seed": report["seed"]} | {name: f"{report['proof'][name]:,}" for name in counts},
    )


def _sentence(part: list[dict[str, Any]]) -> list[str]:
    named = {row["method"]: row for row in part}
    if FULL not in named or SHORTLIST not in named:
        return []
    full, short = named[FULL], named[SHORTLIST]
    return [
        f"Full softmax's scores alone: {full['scores cpu ms']:.1f} ms of processor time; with decoding "
        f"{full['cpu ms']:.1f} ms. The shortlist, all of it: {short['cpu ms']:.2f} ms with {short['union']:,} phrases.",
        "",
    ]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
