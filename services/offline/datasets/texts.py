"""Text collections with questions and the documents that answer them: MedQuAD and SciFact."""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.parquet as pq

from .locate import Locator

Question = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCollection:
    """A corpus. `documents` are texts. A question is a text with the rows of the documents that answer it.
    `tested_are_trained`: every document of a test question has training questions.
    """

    name: str
    documents: list[str]
    train: list[Question]
    test: list[Question]
    tested_are_trained: bool


def load_texts(name: str, locator: Locator | None = None) -> TextCollection:
    """Load medquad or scifact. Raises: ValueError for another name, or a file that is not on this machine."""
    if name not in _COLLECTIONS:
        raise ValueError(f"data={name!r}; allowed: {', '.join(_COLLECTIONS)}")
    return _COLLECTIONS[name](locator or Locator())


def _medquad(locator: Locator) -> TextCollection:
    row_of: dict[str, int] = {}
    answers: list[list[str]] = []
    parts: dict[str, list[Question]] = {"train": [], "test": []}
    for row in pq.read_table(locator.file("medquad/qa.parquet")).to_pylist():
        number = row_of.setdefault(row["document_id"], len(row_of))
        if number == len(answers):
            answers.append([row["focus"]])
        answers[number].append(row["answer"] or "")
        parts[row["split"]].append((str(row["question"]), (number,)))
    return TextCollection(
        name="medquad",
        documents=[" ".join(texts) for texts in answers],
        train=parts["train"],
        test=parts["test"],
        tested_are_trained=True,
    )


def _scifact(locator: Locator) -> TextCollection:
    corpus = pq.read_table(locator.file("scifact/corpus.parquet")).to_pylist()
    row_of = {document["doc_id"]: row for row, document in enumerate(corpus)}
    wanted: dict[str, set[int]] = {}
    for judged in pq.read_table(locator.file("scifact/qrels.parquet")).to_pylist():
        wanted.setdefault(judged["query_id"], set()).add(row_of[judged["doc_id"]])
    parts: dict[bool, list[Question]] = {True: [], False: []}
    for query in pq.read_table(locator.file("scifact/queries.parquet")).to_pylist():
        parts[query["split"] == "train"].append((query["text"], tuple(sorted(wanted[query["query_id"]]))))
    return TextCollection(
        name="scifact",
        documents=[f"{document['title']} {document['text']}" for document in corpus],
        train=parts[True],
        test=parts[False],
        tested_are_trained=False,
    )


_COLLECTIONS: dict[str, Callable[[Locator], TextCollection]] = {"medquad": _medquad, "scifact": _scifact}
