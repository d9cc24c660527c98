"""docs/benchmarks/text.md and its plots, from the rows of `freshet bench text`. It formats; it measures nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, wherever it runs

from matplotlib import pyplot as plt
from matplotlib.ticker import StrMethodFormatter

from services.offline.evaluation.common.tables import markdown

Row = dict[str, Any]

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
_SHOWN = ("recall@1", "recall@5", "recall@10", "recall@20", "recall@100", "hits@10", "mrr@10")
_COLOURS = {"phrases": "#0b6e4f", "words": "#1f77b4", "BPE": "#d95f02", "unigram": "#7b3294", "word pieces": "#4d4d4d"}


def text(report: dict[str, Any]) -> str:
    """The page."""
    rows = report["rows"]
    lines = [
        "# Text: who answers words best",
        "",
        "Real questions over real documents, trained on the training questions alone: lexical, a sentence encoder, "
        "remembered questions (PEFA), the encoder fine-tuned, text MoL, and generated identifiers (PIXAR) by size "
        "of vocabulary and tokenizer.",
        "",
        f"Measured by {_commands(report)} on {report['machine']}, in {report['seconds']:,.0f} s. "
        # What a person has to say of how text.json came about, kept by --resume.
        f"{report.get('remark', '')}".rstrip(),
        "",
        "± is the standard deviation over seeds. Milliseconds: one question at a time, encoding included, median on a "
        "shared machine. MB: what answering holds besides the encoder. The encoder is all-MiniLM-L6-v2.",
        "",
    ]
    if report["quick"]:
        lines += ["**Quick run**: a part of each set and minimal training; the numbers say nothing of quality.", ""]
    for data in dict.fromkeys(row["data"] for row in rows if row["table"] == "answers"):
        lines += _answer_lines(data, [row for row in rows if (row["table"], row["data"]) == ("answers", data)])
    if any(row["table"] == "answers" and row["vocabulary"] for row in rows):
        lines += ["## Quality against vocabulary size", "", "![vocabulary size](text_vocabulary.png)", ""]
    lines += ["## Quality against latency", "", "![latency](text_latency.png)", ""]
    return "\n".join(lines + _length_lines([row for row in rows if row["table"] == "lengths"]))


def _commands(report: dict[str, Any]) -> str:
    return " and ".join(f"`{command}`" for command in dict.fromkeys(one["command"] for one in report["parts"]))


def plot_sizes(rows: Sequence[Row], path: Path) -> None:
    """MRR@10 and Recall@100 of PIXAR by vocabulary size, a line per tokenizer; nothing where none was trained."""
    own = [row for row in rows if row["table"] == "answers" and row["vocabulary"]]
    if not own:
        return
    sets = list(dict.fromkeys(row["data"] for row in own))
    figure, panels = plt.subplots(
        2, len(sets), figsize=(5 * len(sets), 7), squeeze=False, sharex=True, constrained_layout=True
    )
    for column, data in enumerate(sets):
        for line, name in enumerate(("mrr@10", "recall@100")):
            panel = panels[line][column]
            for kind, colour in _COLOURS.items():
                part = [row for row in own if row["data"] == data and row["notes"]["tokenizer"] == kind]
                part.sort(key=lambda row: int(row["vocabulary"]))
                if part:
                    panel.errorbar(
                        [row["vocabulary"] for row in part],
                        [row[name] for row in part],
                        yerr=[row[f"{name}_sd"] or 0.0 for row in part],
                        marker="o",
                        color=colour,
                        label=kind,
                    )
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            # From zero: a panel of points that lie close together must not look like one of points far apart.
            panel.set(xlabel="tokens in the vocabulary", ylim=(0, None))
            panel.set_title(f"{TITLES[data]}: {name}", loc="left", fontsize=10)
            _plain(panel)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_latency(rows: Sequence[Row], path: Path) -> None:
    """MRR@10 against milliseconds per question, a panel per set."""
    own = [row for row in rows if row["table"] == "answers"]
    sets = list(dict.fromkeys(row["data"] for row in own))
    figure, panels = plt.subplots(1, len(sets), figsize=(6 * len(sets), 4.6), squeeze=False, constrained_layout=True)
    for panel, data in zip(panels[0], sets, strict=True):
        for number, row in enumerate(row for row in own if row["data"] == data):
            panel.scatter(row["milliseconds"], row["mrr@10"], color=f"C{number % 10}", marker="os^D"[number // 10 % 4])
            panel.scatter([], [], color=f"C{number % 10}", marker="os^D"[number // 10 % 4], label=row["contender"])
        panel.set(xscale="log", xlabel="ms per question (median)")
        panel.set_title(f"{TITLES[data]}: mrr@10", loc="left", fontsize=10)
        _plain(panel)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _answer_lines(data: str, rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    header = ("contender", "seeds", *_SHOWN, "ms", "p95", "MB", "setting")
    return [
        f"## {TITLES[data]}: {first['questions']:,} test questions over {first['documents']:,} documents",
        "",
        _NOTES[data],
        "",
        *markdown(header, ([*_answer_cells(row)] for row in rows)),
        "",
    ]


def _answer_cells(row: Row) -> list[str]:
    notes = row["notes"]
    said = [str(notes["setting"])] if "setting" in notes else []
    if row["vocabulary"]:
        said += [f"{row['vocabulary']:,} tokens", f"{notes['identifier_tokens']:.1f} per identifier"]
    elif "tokenizer" in notes:
        said.append("the same models")
    if "train_seconds" in notes and (row["vocabulary"] or "tokenizer" not in notes):
        steps = f"{notes['steps']} steps, " if "steps" in notes else ""
        said.append(f"{steps}trained {notes['train_seconds']:.0f} s")
    return [
        row["contender"],
        str(row["seeds"]),
        *(f"{row[name]:.3f}" + ("" if row[f"{name}_sd"] is None else f" ± {row[f'{name}_sd']:.3f}") for name in _SHOWN),
        f"{row['milliseconds']:.3g}",
        f"{row['p95_milliseconds']:.3g}",
        f"{row['bytes'] / 1e6:.1f}",
        ", ".join(said) or "–",
    ]


def _length_lines(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    header = ("texts", "tokenizer", "tokens", "mean length", "99th percentile", "of the word pieces'", "built in s")
    cells = [
        [
            f"{TITLES[row['data']]} ({row['texts']:,})",
            row["tokenizer"],
            f"{row['size']:,}",
            f"{row['mean']:.2f}",
            f"{row['p99']:.0f}",
            f"{row['share_of_word_pieces']:.2f}",
            f"{row['build_seconds']:.1f}",
        ]
        for row in rows
    ]
    return [
        "## Identifier lengths, as in the paper's Table 6",
        "",
        "Each vocabulary is built for the texts that it cuts, as the paper's are; word pieces are MiniLM's own. A "
        "vocabulary smaller than asked for has no more pieces that occur often enough.",
        "",
        *markdown(header, cells),
        "",
    ]


def _plain(panel: Any) -> None:
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=7)
