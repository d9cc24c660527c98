"""docs/benchmarks/pefa.md and its plots, from the rows of `freshet bench pefa`. It formats; it measures nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.tables import filled, markdown

Row = dict[str, Any]

_FOLDER = Path(__file__).parent

TITLES = {"scifact": "SciFact", "medquad": "MedQuAD"}
# A plain NumPy transcription of the paper at the best lambda and k of a sweep: encoder alone, XS, XL.
TRANSCRIBED = {
    "scifact": {"recall@10": (0.773, 0.866, 0.872), "recall@100": (0.918, 0.953, 0.963)},
    "medquad": {"recall@1": (0.568, 0.666, 0.670), "recall@10": (0.949, 0.993, 0.991)},
}
# What a reader has to know of a set before comparing with other numbers.
_NOTES = {
    "scifact": "A document is its title and abstract. A document without feedback keeps all of its vector; as "
    "equation 8 is printed, and in libpecos, it keeps only λ of it, which costs documents that nobody asked for.",
    "medquad": "A document is its topic's name and the text of its answers, so the encoder alone begins higher than "
    "the transcription's .568 did (presumably on documents put together in another way). Every tested document has "
    "training questions, so both readings of equation 8 rank alike.",
}
_METHODS = {"encoder": "encoder alone", "xs": "+ PEFA-XS", "xl": "+ PEFA-XL"}
_COLOURS = {"encoder": "#4d4d4d", "xs": "#1f77b4", "xl": "#d95f02"}
_SUFFIXES = ("", "_gain", "_gain_95", "_unseen", "_sd")
_RECALLS = ("recall@1", "recall@10", "recall@100")


def page(report: dict[str, Any]) -> str:
    """The page; a `note` is what a person adds to the stored report."""
    rows = report["rows"]
    content = [row for row in rows if row["table"] == "content"]
    return filled(
        _FOLDER / "page.template.md",
        **{"note": ""}
        | report
        | {
            "sets": [_set_part(data, rows) for data in _sets(rows)],
            "content": filled(_FOLDER / "content.template.md", rows=content, **content[0]) if content else "",
        },
    )


def plot(report: dict[str, Any], out: Path) -> None:
    """pefa.png and pefa_shares.png."""
    plot_sweep(report["rows"], out / "pefa.png")
    plot_shares(report["rows"], out / "pefa_shares.png")


def plot_sweep(rows: Sequence[Row], path: Path) -> None:
    """Recall over lambda, one panel per set and recall that decides: XS, and XL at the paper's three k."""
    wanted = [(data, name) for data in _sets(rows) for name in TRANSCRIBED[data]]
    with panels(path, 1, len(wanted), size=(4.2, 3.6)) as drawn:
        for panel, (data, name) in zip(drawn[0], wanted, strict=True):
            titled(panel, f"{TITLES[data]}: {name}", xlabel="λ (1 = encoder alone)")
            part = [row for row in rows if (row["table"], row["data"]) == ("sweep", data) and not row["printed"]]
            for k, style in zip(sorted({row["k"] or 0 for row in part}), ("o-", "s-", "s--", "s:"), strict=False):
                line = [row for row in part if (row["k"] or 0) == k and row["method"] != "encoder"]
                colour, label = (_COLOURS["xl"], f"XL, k={k}") if k else (_COLOURS["xs"], "XS")
                values = [row[name] for row in line]
                panel.plot([row["lambda"] for row in line], values, style, color=colour, label=label)
            _alone(panel, part, name)


def plot_shares(rows: Sequence[Row], path: Path) -> None:
    """The paper's Figure 3: recall above, megabytes below, over the share of training pairs."""
    with panels(path, 2, len(_sets(rows)), size=(5.5, 3)) as drawn:
        for column, data in enumerate(_sets(rows)):
            name = next(iter(TRANSCRIBED[data]))
            recall = titled(drawn[0][column], f"{TITLES[data]}: {name}")
            megabytes = titled(drawn[1][column], "index, MB", xlabel="share of the training pairs")
            own = [row for row in rows if row["data"] == data]
            _alone(recall, own, name)
            for method in ("xs", "xl"):
                part = [row for row in own if (row["table"], row["method"]) == ("share", method)]
                shares, style = [row["share"] for row in part], {"color": _COLOURS[method], "label": method.upper()}
                spread = [row[f"{name}_sd"] or 0.0 for row in part]
                recall.errorbar(shares, [row[name] for row in part], yerr=spread, marker="o", **style)
                megabytes.plot(shares, [row["index_bytes"] / 1e6 for row in part], "o-", **style)
            megabytes.set_ylim(bottom=0)


def _alone(panel: Any, rows: Sequence[Row], name: str) -> None:
    alone = next(row for row in rows if row["method"] == "encoder")
    panel.axhline(alone[name], color=_COLOURS["encoder"], linewidth=1, linestyle=":", label="encoder alone")


def _set_part(data: str, rows: Sequence[Row]) -> str:
    # The two recalls that decide stand first, whichever they are.
    a, b = TRANSCRIBED[data]
    short = {"a": a, "b": b, "c": next(name for name in _RECALLS if name not in (a, b))}
    parts: dict[str, list[Row]] = {"chosen": [], "sweep": [], "serving": [], "share": []}
    for row in rows:
        if row["data"] == data and row["table"] in parts:
            same = {
                f"{alias}{suffix}": row.get(f"{name}{suffix}") for alias, name in short.items() for suffix in _SUFFIXES
            }
            names = {"upper": row["method"].upper(), "name": _METHODS.get(row["method"])}
            parts[row["table"]].append(row | same | names)
    for row in parts["chosen"]:
        row["name"] += " (as printed)" if row["printed"] else ""
        number = list(_METHODS).index(row["method"])
        row |= {f"{alias}_transcribed": TRANSCRIBED[data][short[alias]][number] for alias in "ab"}
        if row["method"] == "encoder":
            row |= {f"{alias}_{name}": None for alias in "ab" for name in ("gain", "gain_95")}
    values = parts["chosen"][0] | short | parts | {"sweep": _sweep_table(parts["sweep"], b)}
    return filled(_FOLDER / "set.template.md", **values | {"title": TITLES[data], "note": _NOTES[data]})


def _sweep_table(rows: Sequence[Row], name: str) -> list[str]:
    """A line per method and k, a column per lambda."""
    alone = next(row for row in rows if row["method"] == "encoder")
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["method"] != "encoder":
            label = f"PEFA-{row['upper']}" + (f" (k={row['k']})" if row["k"] else "")
            label += " as printed" if row["printed"] else ""
            found.setdefault(label, {})[row["lambda"]] = row[name]
    shares = sorted({share for line in found.values() for share in line})
    lines = (
        [label, *(f"{line[share]:.3f}" for share in shares), f"{alone[name]:.3f}"] for label, line in found.items()
    )
    return markdown(["λ", *(f"{share:g}" for share in shares), "1 (encoder alone)"], lines)


def _sets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["data"] for row in rows if row["table"] == "chosen"))
