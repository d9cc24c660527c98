"""Real texts with questions: MedQuAD (also with its topic masked) and SciFact; titles and queries as bare texts.

Every question knows the documents that answer it, and every document has identifiers: what a generator may say to name
it, none of which comes from a test question. It knows neither encoders nor metrics.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .locate import Locator

Question = tuple[str, tuple[int, ...]]

_WORDS = re.compile(r"\w+")
# A topic's words that say nothing of it stay in a masked question.
_KEPT_WORDS = frozenset({"a", "an", "and", "at", "by", "for", "from", "in", "of", "on", "or", "the", "to", "with"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCollection:
    """One corpus. `documents`: texts; `identifiers`: of each document; questions: text and rows of its documents.
    `tested_are_trained`: every tested document has training questions, by the way the set was split."""

    name: str
    documents: list[str]
    identifiers: list[list[str]]
    train: list[Question]
    test: list[Question]
    tested_are_trained: bool


def load_texts(name: str, locator: Locator | None = None) -> TextCollection:
    """A collection by name: medquad, medquad-masked or scifact.

    Raises: ValueError for another name, or a file that is not on this machine.
    """
    if name not in _COLLECTIONS:
        raise ValueError(f"data={name!r}; allowed: {', '.join(_COLLECTIONS)}")
    return _COLLECTIONS[name](locator or Locator())


def identifier_texts(name: str, locator: Locator | None = None) -> list[str]:
    """Texts that identifiers could be: "medquad-questions", "ml-25m-titles" or "queries".

    Raises: ValueError as `load_texts`.
    """
    if name not in _IDENTIFIERS:
        raise ValueError(f"texts={name!r}; allowed: {', '.join(_IDENTIFIERS)}")
    file, column = _IDENTIFIERS[name]
    return pq.read_table(_file(locator or Locator(), file), columns=[column])[column].to_pylist()  # type: ignore[no-any-return]


def part(texts: TextCollection, *, documents: int, questions: int, seed: int) -> TextCollection:
    """A smaller collection: at most so many test questions, their documents first, drawn ones up to `documents`, and
    the training questions about them.

    Raises: ValueError if either is below 1.
    """
    if documents < 1 or questions < 1:
        raise ValueError(f"documents={documents}, questions={questions}; allowed: at least 1 of each")
    rng = random.Random(seed)
    test = rng.sample(texts.test, min(questions, len(texts.test)))
    kept = dict.fromkeys(row for _, rows in test for row in rows)
    kept.update(dict.fromkeys(rng.sample(range(len(texts.documents)), len(texts.documents))))
    rows = sorted(list(kept)[:documents])
    new_row = {row: new for new, row in enumerate(rows)}

    def about(asked: Sequence[Question]) -> list[Question]:
        found = [(text, tuple(new_row[row] for row in wanted if row in new_row)) for text, wanted in asked]
        return [(text, wanted) for text, wanted in found if wanted]

    return TextCollection(
        name=texts.name,
        documents=[texts.documents[row] for row in rows],
        identifiers=[texts.identifiers[row] for row in rows],
        train=about(texts.train),
        test=about(test),
        tested_are_trained=texts.tested_are_trained,
    )


def masked(question: str, topic: str) -> str:
    """The question without the words of its topic, whatever their case."""
    gone = {word for word in _WORDS.findall(topic.lower()) if word not in _KEPT_WORDS}
    left = _WORDS.sub(lambda found: "" if found[0].lower() in gone else found[0], question)
    return " ".join(left.split())


def _medquad(locator: Locator) -> TextCollection:
    """5,476 topics, each the text of its answers, named by its topic and its training questions."""
    return _topics(locator, "medquad", lambda row: str(row["question"]))


def _medquad_masked(locator: Locator) -> TextCollection:
    """MedQuAD with the topic's words taken out of every question: naming the topic is most of that task.

    Identifiers stay whole; training questions are masked like test questions, so that both are asked alike.
    """
    return _topics(locator, "medquad-masked", lambda row: masked(row["question"], row["focus"]))


def _topics(locator: Locator, name: str, question: Callable[[dict[str, Any]], str]) -> TextCollection:
    row_of: dict[str, int] = {}
    answers: list[list[str]] = []
    identifiers: list[list[str]] = []
    parts: dict[str, list[Question]] = {"train": [], "test": []}
    for row in _rows(locator, "medquad/qa.parquet"):
        number = row_of.setdefault(row["document_id"], len(row_of))
        if number == len(answers):
            answers.append([row["focus"]])
            identifiers.append([row["focus"]])
        answers[number].append(row["answer"] or "")
        parts[row["split"]].append((question(row), (number,)))
        if row["split"] == "train":
            identifiers[number].append(row["question"])
    return TextCollection(
        name=name,
        documents=[" ".join(texts) for texts in answers],
        identifiers=identifiers,
        train=parts["train"],
        test=parts["test"],
        tested_are_trained=True,
    )


def _scifact(locator: Locator) -> TextCollection:
    """5,183 abstracts named by their titles and the training claims that cite them; 809 and 300 claims."""
    corpus = _rows(locator, "scifact/corpus.parquet")
    row_of = {document["doc_id"]: row for row, document in enumerate(corpus)}
    wanted: dict[str, set[int]] = {}
    for judged in _rows(locator, "scifact/qrels.parquet"):
        wanted.setdefault(judged["query_id"], set()).add(row_of[judged["doc_id"]])
    parts: dict[bool, list[Question]] = {True: [], False: []}
    for query in _rows(locator, "scifact/queries.parquet"):
        parts[query["split"] == "train"].append((query["text"], tuple(sorted(wanted[query["query_id"]]))))
    identifiers = [[document["title"]] for document in corpus]
    for text, documents in parts[True]:
        for number in documents:
            identifiers[number].append(text)
    return TextCollection(
        name="scifact",
        documents=[f"{document['title']} {document['text']}" for document in corpus],
        identifiers=identifiers,
        train=parts[True],
        test=parts[False],
        tested_are_trained=False,
    )


_COLLECTIONS: dict[str, Callable[[Locator], TextCollection]] = {
    "medquad": _medquad,
    "medquad-masked": _medquad_masked,
    "scifact": _scifact,
}
COLLECTIONS = tuple(_COLLECTIONS)
_IDENTIFIERS = {
    "medquad-questions": ("medquad/qa.parquet", "question"),
    "ml-25m-titles": ("ml-25m-titles/movies.parquet", "title"),
    "queries": ("queries/queries.parquet", "text"),
}
IDENTIFIER_TEXTS = tuple(_IDENTIFIERS)


def _rows(locator: Locator, name: str) -> list[dict[str, Any]]:
    return pq.read_table(_file(locator, name)).to_pylist()  # type: ignore[no-any-return]


def _file(locator: Locator, name: str) -> Path:
    tried = []
    for base, label in locator.folders():
        if (base / name).is_file():
            return base / name
        tried.append(label)
    raise ValueError(f"{name} is not on this machine; looked in {', '.join(tried)}; set FRESHET_DATA")
