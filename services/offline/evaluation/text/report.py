"""`freshet bench text`: which way of answering words finds most, on real questions and documents.

Recall, hits and MRR over seeds, latency one question at a time, memory. Every answerer sees the training questions
only. A finished part is written at once, so that `--resume` goes on where a run ended.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import StrMethodFormatter

from services.offline.datasets.locate import Locator
from services.offline.datasets.texts import COLLECTIONS, TextCollection, load_texts, part
from services.offline.evaluation.common.embeddings import EmbeddingSource
from services.offline.evaluation.common.plots import panels, titled
from services.offline.evaluation.common.recall import NAMES, measures
from services.offline.evaluation.common.report import Report, Request, filled, machine, written
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.text.baselines import BASELINES, Answerer, Answering, Asked
from services.offline.evaluation.text.generated import examples, generated_row, vocabularies
from services.offline.evaluation.text.trained import FULL, QUICK, length_rows, trained

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
    generated = [row | {"title": TITLES[row["data"]]} for row in report["rows"] if row["table"] == "generated"]
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
            "generated": generated,
            "examples": sorted(examples(generated), key=lambda row: (row["data"], row["question"])),
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


_QUICK_DOCUMENTS, _QUICK_QUESTIONS = 600, 200
_TIMED, _QUICK_TIMED = 100, 20  # questions asked one at a time
_WARM = 3
_LENGTHS = "lengths"


def run(
    request: Request,
    *,
    names: Sequence[str] = COLLECTIONS,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int | None = None,
    train: bool = False,
    source: EmbeddingSource | None = None,
    resume: bool = False,
) -> Report:
    """All rows; writes text.{md,json} and plots of quality against vocabulary size and latency after every answerer.

    `epochs` of training per phrase model; without `train`, what has to be trained is left out. With `resume`, what
    text.json holds already stays, other sets' rows too, and is not measured again.
    Raises: ValueError for an unknown set, a missing file, weights that are not installed, or rows to resume that were
    measured with other settings, with what to do.
    """
    source = source or EmbeddingSource(progress=lambda what, done, total: request.say(f"{what}, {done:,} of {total:,}"))
    locator = Locator(environ=source.environ)
    budget = QUICK if request.quick else FULL
    budget = budget if epochs is None else budget.lasting(epochs)
    chosen = list(BASELINES)
    if train:
        chosen += trained(budget, quick=request.quick)
    settings = {"quick": request.quick, "seeds": list(seeds), "epochs": budget.epochs}
    report = _begun(request, settings, resume=resume)
    for name in names:
        texts = load_texts(name, locator)
        if request.quick:
            texts = part(texts, documents=_QUICK_DOCUMENTS, questions=_QUICK_QUESTIONS, seed=request.seed)
        asked = Asked(texts=texts, source=source, quick=request.quick, say=request.say)
        for one in chosen:
            with _measuring(request, report, name, one.name) as found:
                if found is not None:
                    found += rows(asked, [one], seeds=seeds)
        for kind, size in vocabularies(budget) if train else ():
            with _measuring(request, report, name, f"generated, {kind} {size}") as found:
                if found is not None:
                    found.append(generated_row(asked, seeds[0], budget, kind=kind, size=size))
    with _measuring(request, report, _LENGTHS, _LENGTHS) as found:
        if found is not None:
            found += length_rows(quick=request.quick, locator=locator, say=request.say)
    return report


def _begun(request: Request, settings: dict[str, Any], *, resume: bool) -> Report:
    """A report without rows, or the one that text.json holds. Raises: ValueError where that has other settings."""
    empty: Report = {"benchmark": "text", "machine": machine(), **settings, "parts": [], "rows": [], "seconds": 0.0}
    path = request.out / "text.json"
    if not resume or not path.is_file():
        return empty
    held: Report = json.loads(path.read_text(encoding="utf-8"))
    for field, wanted in settings.items():
        if held.get(field) != wanted:
            raise ValueError(
                f"{path} has {field} {held.get(field)}, this run {wanted}: rows of one page are measured alike; "
                "leave --resume out, or choose another --out"
            )
    return held


@contextmanager
def _measuring(request: Request, report: Report, data: str, made_by: str) -> Iterator[list[Row] | None]:
    """Rows to fill in, and None where the report has them; afterwards they are part of it, and it is written."""
    if any((one["data"], one["made_by"]) == (data, made_by) for one in report["parts"]):
        yield None
        return
    began = time.perf_counter()
    found: list[Row] = []
    yield found
    seconds = round(time.perf_counter() - began, 1)
    report["parts"].append({"data": data, "made_by": made_by, "command": request.how, "seconds": seconds})
    report["rows"] = sorted([*report["rows"], *found], key=_place)
    report["seconds"] = round(sum(one["seconds"] for one in report["parts"]), 1)
    written(request, report, page, plot)


def _place(row: Row) -> int:
    """Sets in their order, lengths last; within a set, as measured."""
    return COLLECTIONS.index(row["data"]) if row["table"] == "answers" else len(COLLECTIONS)


def rows(asked: Asked, answerers: Sequence[Answerer], *, seeds: Sequence[int]) -> list[Row]:
    """One row per answerer's answer: means over seeds, with the deviation over seeds where there are several."""
    found: list[Row] = []
    for one in answerers:
        by_name: dict[str, list[Row]] = {}
        for seed in seeds if one.seeded else seeds[:1]:
            asked.say(f"{asked.texts.name}: {one.name}, seed {seed}")
            for name, answering in one.make(asked, seed).items():
                by_name.setdefault(name, []).append(_measured(asked, answering))
        found += [_over_seeds(asked.texts, name, runs) for name, runs in by_name.items()]
    return found


def _measured(asked: Asked, answering: Answering) -> Row:
    texts = asked.texts
    questions = [text for text, _ in texts.test]
    values = measures(list(map(list, answering.answer(questions))), [wanted for _, wanted in texts.test])
    # Evenly spread, since sets are sorted by topic.
    count = min(_QUICK_TIMED if asked.quick else _TIMED, len(questions))
    some = [questions[place] for place in np.linspace(0, len(questions) - 1, count).astype(int)]
    times = Times.of(lambda question: answering.answer([question]), [*some[:_WARM], *some], warm_up=len(some[:_WARM]))
    return {
        **{name: float(each.mean()) for name, each in values.items()},
        "milliseconds": times.median_ms,
        "p95_milliseconds": times.p95_ms,
        "bytes": answering.nbytes,
        "vocabulary": answering.vocabulary,
        "notes": answering.notes,
    }


def _over_seeds(texts: TextCollection, name: str, runs: Sequence[Row]) -> Row:
    row: Row = {
        "table": "answers",
        "data": texts.name,
        "contender": name,
        "documents": len(texts.documents),
        "questions": len(texts.test),
        "seeds": len(runs),
    }
    for measure in NAMES:
        values = [run[measure] for run in runs]
        row[measure] = float(np.mean(values))
        row[f"{measure}_sd"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    for field in ("milliseconds", "p95_milliseconds"):
        row[field] = float(np.median([run[field] for run in runs]))
    return row | {field: runs[0][field] for field in ("bytes", "vocabulary", "notes")}
