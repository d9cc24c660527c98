"""docs/benchmarks/text.md and its plots, from the rows of `freshet bench text`. It formats; it measures nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import StrMethodFormatter

from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.tables import filled

Row = dict[str, Any]

_FOLDER = Path(__file__).parent
TITLES = {
    "medquad": "MedQuAD",
    "medquad-masked": "MedQuAD, topic masked",
    "scifact": "SciFact",
    "medquad-questions": "MedQuAD's questions",
    "ml-25m-titles": "Film titles (MovieLens-25M)",
    "queries": "Search queries",
}
_NOTES = {
    "medquad": "A document is a topic with its answers; its identifiers are the topic and its training questions. "
    "Every tested topic has training questions, and naming the topic is most of the task.",
    "medquad-masked": "The same with the words of the topic taken out of every question: what is left asks for any "
    "topic, unless it says more than its topic does.",
    "scifact": "A document is an abstract; its identifiers are its title and the training claims that cite it. Most "
    "tested abstracts have no training claim.",
}
_COLOURS = {"phrases": "#0b6e4f", "words": "#1f77b4", "BPE": "#d95f02", "unigram": "#7b3294", "word pieces": "#4d4d4d"}


def page(report: dict[str, Any]) -> str:
    """The page; a `remark`, kept by --resume, is what a person has to say of how the report came about."""
    answers = [row for row in report["rows"] if row["table"] == "answers"]
    sets = []
    for data, rows in _by_set(answers).items():
        shown = [row | {"said": _said(row)} for row in rows]
        values = rows[0] | {"title": TITLES[data], "note": _NOTES[data], "rows": shown}
        sets.append(filled(_FOLDER / "set.template.md", **values))
    lengths = [row | {"title": TITLES[row["data"]]} for row in report["rows"] if row["table"] == "lengths"]
    commands = dict.fromkeys(f"`{one['command']}`" for one in report["parts"])
    return filled(
        _FOLDER / "page.template.md",
        **{"remark": ""}
        | report
        | {
            "commands": " and ".join(commands),
            "sets": sets,
            "sizes": any(row["vocabulary"] for row in answers),
            "lengths": lengths,
        },
    )


def plot(report: dict[str, Any], out: Path) -> None:
    """text_vocabulary.png, where a phrase model was trained, and text_latency.png."""
    answers = [row for row in report["rows"] if row["table"] == "answers"]
    plot_sizes([row for row in answers if row["vocabulary"]], out / "text_vocabulary.png")
    plot_latency(answers, out / "text_latency.png")


def plot_sizes(rows: Sequence[Row], path: Path) -> None:
    """MRR@10 and Recall@100 of PIXAR by vocabulary size, a line per tokenizer; nothing without rows."""
    if not rows:
        return
    with panels(path, 2, len(_by_set(rows)), size=(5, 3.5)) as drawn:
        for column, (data, own) in enumerate(_by_set(rows).items()):
            for line, name in enumerate(("mrr@10", "recall@100")):
                panel = titled(drawn[line][column], f"{TITLES[data]}: {name}", xlabel="tokens in the vocabulary")
                for kind, colour in _COLOURS.items():
                    part = [row for row in own if row["notes"]["tokenizer"] == kind]
                    part.sort(key=lambda row: int(row["vocabulary"]))
                    if part:
                        spread = [row[f"{name}_sd"] or 0.0 for row in part]
                        panel.errorbar([row["vocabulary"] for row in part], [row[name] for row in part], spread,
                                       marker="o", color=colour, label=kind)  # fmt: skip
                panel.set_xscale("log", base=2)
                panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
                # From zero: a panel of points that lie close together must not look like one of points far apart.
                panel.set_ylim(0, None)


def plot_latency(rows: Sequence[Row], path: Path) -> None:
    """MRR@10 against milliseconds per question, a panel per set."""
    with panels(path, 1, max(1, len(_by_set(rows))), size=(6, 4.6)) as drawn:
        for panel, (data, own) in zip(drawn[0], _by_set(rows).items(), strict=False):
            titled(panel, f"{TITLES[data]}: mrr@10", xscale="log", xlabel="ms per question (median)")
            for number, row in enumerate(own):
                style = {"color": f"C{number % 10}", "marker": "os^D"[number // 10 % 4], "label": row["contender"]}
                panel.plot(row["milliseconds"], row["mrr@10"], linestyle="none", **style)


def _by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["data"], []).append(row)
    return found


def _said(row: Row) -> str:
    """The setting, vocabulary and training of a row."""
    notes = row["notes"]
    said = [str(notes["setting"])] if "setting" in notes else []
    if row["vocabulary"]:
        said += [f"{row['vocabulary']:,} tokens", f"{notes['identifier_tokens']:.1f} per identifier"]
    elif "tokenizer" in notes:
        said.append("the same models")
    if "train_seconds" in notes and (row["vocabulary"] or "tokenizer" not in notes):
        steps = f"{notes['steps']} steps, " if "steps" in notes else ""
        said.append(f"{steps}trained {notes['train_seconds']:.0f} s")
    return ", ".join(said) or "–"
