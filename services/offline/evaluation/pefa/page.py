"""docs/benchmarks/pefa.md and its plots, from the rows of `freshet bench pefa`. It formats; it measures nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, wherever it runs

from matplotlib import pyplot as plt

from services.offline.evaluation.common.tables import filled, markdown

Row = dict[str, Any]

_FOLDER = Path(__file__).parent

TITLES = {"scifact": "SciFact", "medquad": "MedQuAD"}
# A plain NumPy transcription of the paper at the best lambda and k of a sweep: encoder alone, XS, XL (issue 4).
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
_METHODS = ("encoder", "xs", "xl")
_NAMES = {"encoder": "encoder alone", "xs": "+ PEFA-XS", "xl": "+ PEFA-XL"}
_COLOURS = {"encoder": "#4d4d4d", "xs": "#1f77b4", "xl": "#d95f02"}
_RECALLS = ("recall@1", "recall@10", "recall@100")


def text(report: dict[str, Any]) -> str:
    """The page."""
    rows = report["rows"]
    return filled(
        _FOLDER / "page.template.md",
        command=report["command"],
        seed=report["seed"],
        machine=report["machine"],
        sets="".join(_set_part(data, [row for row in rows if row["data"] == data]) for data in _sets(rows)),
        content=_content_part([row for row in rows if row["table"] == "content"]),
    )


def plot_sweep(rows: Sequence[Row], path: Path) -> None:
    """Recall over lambda, one panel per set and recall that decides: XS, and XL at the paper's three k."""
    found = [(data, name) for data in _sets(rows) for name in _decided_by(data)]
    figure, panels = plt.subplots(
        1, len(found), figsize=(4.2 * len(found), 3.6), squeeze=False, constrained_layout=True
    )
    for panel, (data, name) in zip(panels[0], found, strict=True):
        part = [row for row in rows if row["table"] == "sweep" and row["data"] == data]
        alone = next(row for row in part if row["method"] == "encoder")
        panel.axhline(alone[name], color=_COLOURS["encoder"], linewidth=1, linestyle=":", label="encoder alone")
        xs = [row for row in part if row["method"] == "xs" and not row["printed"]]
        panel.plot([row["lambda"] for row in xs], [row[name] for row in xs], "o-", color=_COLOURS["xs"], label="XS")
        for k, style in zip(sorted({row["k"] for row in part if row["k"]}), ("-", "--", ":"), strict=False):
            xl = [row for row in part if row["k"] == k]
            panel.plot(
                [row["lambda"] for row in xl],
                [row[name] for row in xl],
                style,
                marker="s",
                color=_COLOURS["xl"],
                label=f"XL, k={k}",
            )
        panel.set_title(f"{TITLES[data]}: {name}", loc="left", fontsize=10)
        panel.set_xlabel("λ (1 = encoder alone)")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(frameon=False, fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_shares(rows: Sequence[Row], path: Path) -> None:
    """The paper's Figure 3: recall above, megabytes below, over the share of training pairs."""
    names = _sets(rows)
    figure, panels = plt.subplots(2, len(names), figsize=(5.5 * len(names), 6), squeeze=False, constrained_layout=True)
    for column, data in enumerate(names):
        name = _decided_by(data)[0]
        recall_panel, bytes_panel = panels[0][column], panels[1][column]
        alone = next(row for row in rows if row["data"] == data and row["method"] == "encoder")
        recall_panel.axhline(alone[name], color=_COLOURS["encoder"], linestyle=":", label="encoder alone")
        for method in ("xs", "xl"):
            part = [row for row in rows if (row["table"], row["data"], row.get("method")) == ("share", data, method)]
            shares = [row["share"] for row in part]
            recall_panel.errorbar(
                shares,
                [row[name] for row in part],
                yerr=[row[f"{name}_sd"] or 0.0 for row in part],
                marker="o",
                color=_COLOURS[method],
                label=method.upper(),
            )
            bytes_panel.plot(
                shares,
                [row["index_bytes"] / 1e6 for row in part],
                marker="o",
                color=_COLOURS[method],
                label=method.upper(),
            )
        recall_panel.set_title(f"{TITLES[data]}: {name}", loc="left", fontsize=10)
        bytes_panel.set_title("index, MB", loc="left", fontsize=10)
        bytes_panel.set_xlabel("share of the training pairs")
        bytes_panel.set_ylim(bottom=0)
        for panel in (recall_panel, bytes_panel):
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _set_part(data: str, rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if row["table"] == "chosen"]
    decided_by = _decided_by(data)
    return filled(
        _FOLDER / "set.template.md",
        title=TITLES[data],
        note=_NOTES[data],
        queries=f"{chosen[0]['queries']:,}",
        unseen_queries=f"{chosen[0]['unseen_queries']:,}",
        decided_by=" and ".join(decided_by),
        swept=decided_by[-1],
        chosen=_chosen_table(data, chosen),
        sweep=_sweep_table(rows, decided_by[-1]),
        serving=_serving_table(rows),
        shares=_share_table(rows, decided_by),
    )


def _content_part(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    first = rows[0]
    header = ("state of a withheld item", "cosine to the trained state", "hit rate@50")
    lines = [[row["state"], f"{row['cosine_to_trained']:.3f}", f"{row['hit_rate@50']:.4f}"] for row in rows]
    return filled(
        _FOLDER / "content.template.md",
        data=first["data"],
        withheld=f"{first['withheld']:,}",
        items=f"{first['items']:,}",
        queries=f"{first['queries']:,}",
        chance=f"{first['chance']:.4f}",
        table=markdown(header, lines),
    )


def _chosen_table(data: str, rows: Sequence[Row]) -> list[str]:
    decided_by = _decided_by(data)
    header = ["method", "λ", "k"]
    for name in decided_by:
        header += [name, "gain", "transcribed", "unseen"]
    header += [name for name in _RECALLS if name not in decided_by]
    lines = []
    for row in rows:
        method = row["method"]
        line = [
            _NAMES[method] + (" (as printed)" if row["printed"] else ""),
            f"{row['lambda']:g}",
            str(row["k"] or "–"),
        ]
        for name in decided_by:
            gain = "–" if method == "encoder" else f"{row[f'{name}_gain']:+.3f} ± {row[f'{name}_gain_95']:.3f}"
            transcribed = TRANSCRIBED[data][name][_METHODS.index(method)]
            line += [f"**{row[name]:.3f}**", gain, f"{transcribed:.3f}", f"{row[f'{name}_unseen']:.3f}"]
        lines.append([*line, *(f"{row[name]:.3f}" for name in _RECALLS if name not in decided_by)])
    return markdown(header, lines)


def _sweep_table(rows: Sequence[Row], name: str) -> list[str]:
    part = [row for row in rows if row["table"] == "sweep"]
    shares = sorted({row["lambda"] for row in part if row["method"] != "encoder"})
    alone = next(row for row in part if row["method"] == "encoder")
    kinds = list(dict.fromkeys((row["method"], row["printed"], row["k"]) for row in part if row["method"] != "encoder"))
    lines = []
    for method, printed, k in kinds:
        own = {row["lambda"]: row for row in part if (row["method"], row["printed"], row["k"]) == (method, printed, k)}
        label = f"PEFA-{method.upper()}{f' (k={k})' if k else ''}{' as printed' if printed else ''}"
        lines.append([label, *(f"{own[share][name]:.3f}" for share in shares), f"{alone[name]:.3f}"])
    return markdown(["λ", *(f"{share:g}" for share in shares), "1 (encoder alone)"], lines)


def _serving_table(rows: Sequence[Row]) -> list[str]:
    header = ("index", "method", *_RECALLS, "build CPU s", "index MB", "CPU ms/query", "× encoder alone")
    return markdown(
        header,
        (
            [
                row["index"],
                row["setting"],
                *(f"{row[name]:.3f}" for name in _RECALLS),
                f"{row['build_cpu_seconds']:.3g}",
                f"{row['index_bytes'] / 1e6:.1f}",
                f"{row['cpu_milliseconds']:.3g}",
                f"{row['over_encoder']:.2f}",
            ]
            for row in rows
            if row["table"] == "serving"
        ),
    )


def _share_table(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    header = ("share of pairs", "pairs", "method", *names, "index MB")
    lines = []
    for row in rows:
        if row["table"] == "share":
            shown = [
                f"{row[name]:.3f}" + ("" if row[f"{name}_sd"] is None else f" ± {row[f'{name}_sd']:.3f}")
                for name in names
            ]
            lines.append(
                [
                    f"{row['share']:.0%}",
                    f"{row['pairs']:,}",
                    row["method"].upper(),
                    *shown,
                    f"{row['index_bytes'] / 1e6:.1f}",
                ]
            )
    return markdown(header, lines)


def _decided_by(data: str) -> tuple[str, ...]:
    return tuple(TRANSCRIBED[data])


def _sets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["data"] for row in rows if row["table"] == "chosen"))
