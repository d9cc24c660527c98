"""The page of `freshet bench generation`: what was asked, what came out, and what the figures rest on.

It formats a report of plain values; it measures nothing.
"""

from typing import Any

from services.offline.evaluation.common.tables import markdown
from services.offline.evaluation.generation.rows import FULL, SHORTLIST
from services.offline.evaluation.generation.world import MAKING

_SHOWN = (
    "method", "setting", "union", "ms", "cpu ms", "floor ms", "speedup", "top 10 tokens", "top 10 identifiers",
    "found its own", "extra MB",
)  # fmt: skip


def page(report: dict[str, Any]) -> str:
    """docs/benchmarks/generation.md."""
    proof, growth, rates = report["proof"], report["growth"], report["rates"]
    lines = [
        "# Generating identifiers",
        "",
        "What does decoding cost as the vocabulary of phrases grows, and what does a shortlist lose against scoring "
        f"every phrase? Measured by `{report['command']}` on {report['machine']}, one query at a time on one thread.",
        "",
        f"Weights: {MAKING}. Trained models are in `freshet bench text`. All methods share one output layer (int8, "
        "384 wide), 8 positions, one trie and 256 nodes a level; `ms` is finding tokens, scoring them and decoding, "
        "the median on a clock; `cpu ms` the same in processor time, which a busy machine moves less. A floor is the "
        f"bytes that must be read at {rates['bytes_read'] / 1e9:.1f} GB a second, decoding not counted. `speedup` is "
        "the processor time of full softmax's scores alone, its decoding left out, over the method's whole time. "
        "`top 10 tokens`: how many of the ten best tokens at a query's own positions the method scores. `top 10 "
        "identifiers`: how many of full softmax's ten best identifiers it answers. `found its own`: the identifier "
        "that the query was made from is among ten.",
        "",
    ]
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
    lines += [
        "## Answers in the catalogue",
        "",
        f"{proof['queries']:,} random and adversarial queries, {proof['answers']:,} answers, {proof['inserts']:,} "
        f"inserts and {proof['deletes']:,} deletes between them (seed {report['seed']}): "
        f"{proof['outside_the_catalogue']} answers outside the catalogue, {proof['not_allowed']} against a filter, "
        f"{proof['wrong_scores']} scores that are not the best assignment, {proof['unseen_inserts']} inserts that the "
        f"next query did not see, {proof['seen_after_delete']} deleted identifiers answered.",
        "",
    ]
    return "\n".join(lines)


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
