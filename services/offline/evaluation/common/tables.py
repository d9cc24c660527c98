"""Benchmark rows as Markdown pages: one table per shape and batch, with the caveats that belong beside the numbers.

It formats what it is given; it measures nothing.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from services.offline.evaluation.catalogues.scene import SYNTHETIC
from services.offline.evaluation.retrieval.rows import TRANSCRIPTION

Row = dict[str, Any]
Report = dict[str, Any]

_MISSING = "–"


def retrieval_page(report: Report) -> str:
    """docs/benchmarks/retrieval.md from a report of `benchmarks.retrieval`: trained bundles first, then synthetic rows.

    Of a generated catalogue the page shows neither recall nor hit rate: see `retrieval`. The report's `notes`, a list
    of sentences that may be absent, stand before the first synthetic table.
    """
    rates, rows = report["rates"], report["rows"]
    trained = [row for row in rows if row["catalogue"] != SYNTHETIC]
    synthetic = [row for row in rows if row["catalogue"] == SYNTHETIC]
    lines = [
        "# Retrieval: speed and proof",
        "",
        "How fast is each algorithm of the papers beside a straightforward PyTorch transcription of it, and what is "
        f"proven of its answers? Measured by `{report['command']}` on {report['machine']}.",
        "",
        f"The machine's rates with {rates['threads']} threads: {rates['multiply_adds'] / 1e9:.0f} billion float32 "
        f"multiply-adds, {rates['exponentials'] / 1e9:.2f} billion exponentials and {rates['bytes_read'] / 1e9:.1f} GB "
        "read a second. A floor is the larger of arithmetic and memory; exact strategies are held against brute "
        "force's. Milliseconds are medians per batch, on a shared machine: trust ratios more. No row was measured on a "
        "GPU.",
        "",
        *_trained_part(trained),
    ]
    if synthetic:
        lines += [
            "## Synthetic catalogues",
            "",
            "The tables below are of generated items and queries at the sizes of the papers. They measure time, memory "
            "and proofs. They have no columns of recall or hit rate: labels could only be drawn from the generated "
            "scores themselves, and the generator's constants were chosen near the paper's own table, so such figures "
            "would be circular.",
            "",
            *_with_blank_lines(report.get("notes", ())),
        ]
        lines += _tables(synthetic, "### Synthetic, {shape}: {items:,} items, batch {batch}", judged=False)
    if report["growth"]:
        lines += ["## Growth: from 10^4 to 10^7 synthetic items of the Books shape", ""]
        lines += [*_growth_table(report["growth"]), ""]
        lines += [f"Left out: {sentence}." for sentence in report["left_out"]]
        lines += ["![growth](growth.png)", ""]
    return "\n".join([*lines, *_proof_part(report["proof"])]).rstrip() + "\n"


def _trained_part(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return [
            "## Trained bundles",
            "",
            "None in this run: `freshet bench retrieval --shape ml-1m --bundle PATH` measures the same rows on a "
            "trained bundle, with recall and the hit rate of people's real next items. What was measured by hand on "
            "trained models of MovieLens-1M, recall included, is in decisions "
            "[006](../decisions/006-exact-top-k.md) and [011](../decisions/011-pools-with-certificates.md).",
            "",
        ]
    return [
        "## Trained bundles",
        "",
        "Items and queries are those of the bundle; a label is a user's real next item. Recall and the labels' hit "
        "rate are relative to the exact top 100.",
        "",
        "![speed against recall](retrieval.png)",
        "",
        *_tables(rows, "### {catalogue}: {items:,} items, batch {batch}", judged=True),
    ]


def _tables(rows: Sequence[Row], title: str, *, judged: bool) -> list[str]:
    lines: list[str] = []
    groups = dict.fromkeys((row["num_items"], row["batch"], row["catalogue"], row["shape"]) for row in rows)
    for group in sorted(groups):
        items, batch, catalogue, shape = group
        part = [row for row in rows if (row["num_items"], row["batch"], row["catalogue"], row["shape"]) == group]
        heading = title.format(catalogue=catalogue, shape=shape, items=items, batch=batch)
        lines += [heading, "", *_retrieval_table(part, judged=judged), ""]
    return lines


def _proof_part(proof: dict[str, Any] | None) -> list[str]:
    if proof is None:
        return []
    kinds = [(f"{proof['small']['catalogues']} awkward catalogues of up to 5,000 items", proof["small"])]
    if "books" in proof:
        kinds.append(("the Books shape in full", proof["books"]))
    return [
        "## Proof",
        "",
        f"Every answer and certificate against the float64 formula, seed {proof['seed']}; wrong ones by algorithm.",
        "",
        *(f"- {found['queries']:,} queries, {what}: {found['wrong']}" for what, found in kinds),
    ]


def _with_blank_lines(sentences: Iterable[str]) -> list[str]:
    return [line for sentence in sentences for line in (sentence, "")]


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


def filled(template: Path, **values: object) -> str:
    """A page: its sentences with values in their places; a list is lines. Raises: KeyError for a missing value."""
    texts = {name: "\n".join(value) if isinstance(value, list) else value for name, value in values.items()}
    return Template(template.read_text(encoding="utf-8")).substitute(texts)


def machine() -> str:
    """The processor and the number of cores in use."""
    info = Path("/proc/cpuinfo")
    names = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in names if "model name" in line), platform.processor())
    return f"{os.cpu_count()} cores ({model})"


def _retrieval_table(rows: Sequence[Row], *, judged: bool) -> list[str]:
    """`judged`: with recall and hit rate, which only rows of a trained bundle have."""
    header = (
        "algorithm",
        "ms",
        "p95",
        "× transcribed brute force",
        "× its transcription",
        *(("recall@100", "relative HR@100") if judged else ()),
        "proven exact",
        "scored in full",
        "× floor",
        "bytes/item",
    )
    return markdown(header, (_retrieval_line(row, judged=judged) for row in rows))


def _retrieval_line(row: Row, *, judged: bool) -> list[str]:
    touched = row["touched"] or {}
    return [
        row["algorithm"] if row["algorithm"].startswith(TRANSCRIPTION) else f"**{row['algorithm']}**",
        _number(row["milliseconds"]),
        _number(row["p95_milliseconds"]),
        _number(row["speedup"]),
        _number(row["speedup_same"]),
        *((_share(row["recall_100"]), _share(row["relative_hr_100"])) if judged else ()),
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
