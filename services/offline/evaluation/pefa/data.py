"""Real queries and documents for PEFA on text: SciFact's claims with their abstracts, MedQuAD's questions with topics.

Documents are cut at 600 characters and encoded by MiniLM, as queries are; vectors are kept in the cache. Also the ways
to take feedback away again, from training alone: folds to choose lambda and k on, and a sampled share of the pairs. It
knows neither PEFA nor metrics.

Letters: n documents, m training queries, B test queries, E pairs, d width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from services.algorithms.states import FloatArray
from services.offline.evaluation.common.embeddings import EmbeddingSource, sentence_vectors

Pairs = npt.NDArray[np.int64]

DOCUMENT_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Queries with the documents that belong to them.

    Shapes: queries (m, d) unit norm; pairs (E, 2) of (query row, document row), each once, in order.
    """

    queries: FloatArray
    pairs: Pairs

    def __len__(self) -> int:
        return len(self.queries)

    def only(self, rows: npt.NDArray[np.bool_]) -> "Judged":
        """The queries where `rows` (m,) is true, numbered anew."""
        new_rows = np.cumsum(rows) - 1
        kept = self.pairs[rows[self.pairs[:, 0]]]
        return Judged(queries=self.queries[rows], pairs=np.column_stack([new_rows[kept[:, 0]], kept[:, 1]]))


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSet:
    """One corpus. `unseen` (B,): the test query's text is no training query's. `tested_are_trained`: every tested
    document has training queries, by the way the set was split; folds keep to it. `decided_by`: the recalls that
    lambda and k are chosen by."""

    name: str
    documents: FloatArray
    train: Judged
    test: Judged
    unseen: npt.NDArray[np.bool_]
    tested_are_trained: bool
    decided_by: tuple[str, ...]


def folds(data: TextSet, *, count: int, seed: int) -> Iterator[tuple[Judged, Judged]]:
    """(fitted, held out) parts of the training queries, `count` times; no query is held out twice.

    Where tested documents are trained ones, so are held-out ones: a query stays in the fitted part if its documents
    would have none left there.
    """
    train = data.train
    fold_of = np.random.default_rng(seed).permutation(len(train)) % count
    for fold in range(count):
        held_out = fold_of == fold
        if data.tested_are_trained:
            fitted_pairs = train.pairs[~held_out[train.pairs[:, 0]]]
            bare = ~np.isin(train.pairs[:, 1], fitted_pairs[:, 1])
            held_out[train.pairs[bare, 0]] = False
        yield train.only(~held_out), train.only(held_out)


def sampled(train: Judged, share: float, *, seed: int) -> Judged:
    """A share of the pairs, drawn uniformly (paper, section 5.4); queries without a pair left are dropped.

    Raises: ValueError if `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share}; allowed: above 0, at most 1")
    count = max(1, round(share * len(train.pairs)))
    chosen = np.sort(np.random.default_rng(seed).permutation(len(train.pairs))[:count])
    left = Judged(queries=train.queries, pairs=train.pairs[chosen])
    return left.only(np.isin(np.arange(len(train)), left.pairs[:, 0]))


def scifact(source: EmbeddingSource) -> TextSet:
    """5,183 abstracts; 809 training claims, 300 validation claims as test; a claim wants the abstracts that it cites.

    Raises: ValueError if a file or the encoder's weights are missing.
    """
    corpus = _rows(source, "scifact/corpus.parquet")
    queries = _rows(source, "scifact/queries.parquet")
    row_of = {document["doc_id"]: row for row, document in enumerate(corpus)}
    wanted: dict[str, list[int]] = {}
    for judged in _rows(source, "scifact/qrels.parquet"):
        wanted.setdefault(judged["query_id"], []).append(row_of[judged["doc_id"]])
    return _text_set(
        "scifact",
        source,
        documents=[f"{document['title']} {document['text']}" for document in corpus],
        train=[(query["text"], wanted[query["query_id"]]) for query in queries if query["split"] == "train"],
        test=[(query["text"], wanted[query["query_id"]]) for query in queries if query["split"] != "train"],
        tested_are_trained=False,
        decided_by=("recall@10", "recall@100"),
    )


def medquad(source: EmbeddingSource) -> TextSet:
    """5,476 topics, each the text of its answers; 13,602 training questions, 2,805 test questions.

    Raises: ValueError if a file or the encoder's weights are missing.
    """
    answers: dict[str, list[str]] = {}
    parts: dict[str, list[tuple[str, list[int]]]] = {"train": [], "test": []}
    row_of: dict[str, int] = {}
    for row in _rows(source, "medquad/qa.parquet"):
        document = row_of.setdefault(row["document_id"], len(row_of))
        answers.setdefault(row["document_id"], [row["focus"]]).append(row["answer"] or "")
        parts[row["split"]].append((row["question"], [document]))
    return _text_set(
        "medquad",
        source,
        documents=[" ".join(texts) for texts in answers.values()],
        train=parts["train"],
        test=parts["test"],
        tested_are_trained=True,
        decided_by=("recall@1", "recall@10"),
    )


_SETS: dict[str, Callable[[EmbeddingSource], TextSet]] = {"scifact": scifact, "medquad": medquad}
NAMES = tuple(_SETS)


def known(name: str) -> str:
    """The name, if there is such a set; ValueError with the names otherwise."""
    if name not in _SETS:
        raise ValueError(f"data={name!r}; allowed: {', '.join(NAMES)}")
    return name


def load(name: str, source: EmbeddingSource) -> TextSet:
    """A set by its name. Raises: ValueError for an unknown name, a missing file or missing weights."""
    return _SETS[known(name)](source)


def _text_set(
    name: str,
    source: EmbeddingSource,
    *,
    documents: Sequence[str],
    train: Sequence[tuple[str, list[int]]],
    test: Sequence[tuple[str, list[int]]],
    tested_are_trained: bool,
    decided_by: tuple[str, ...],
) -> TextSet:
    trained_texts = {_plain(text) for text, _ in train}
    return TextSet(
        name=name,
        documents=_vectors(source, [text[:DOCUMENT_CHARACTERS] for text in documents]),
        train=_judged(source, train),
        test=_judged(source, test),
        unseen=np.array([_plain(text) not in trained_texts for text, _ in test], dtype=bool),
        tested_are_trained=tested_are_trained,
        decided_by=decided_by,
    )


def _judged(source: EmbeddingSource, queries: Sequence[tuple[str, list[int]]]) -> Judged:
    pairs = [(query, document) for query, (_, documents) in enumerate(queries) for document in documents]
    return Judged(
        queries=_vectors(source, [text for text, _ in queries]),
        pairs=np.unique(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=0),
    )


def _vectors(source: EmbeddingSource, texts: Sequence[str]) -> FloatArray:
    return np.ascontiguousarray(sentence_vectors(source, texts), dtype=np.float32)


def _rows(source: EmbeddingSource, name: str) -> list[dict[str, Any]]:
    return pq.read_table(source.file(name)).to_pylist()  # type: ignore[no-any-return]


def _plain(text: str) -> str:
    """What two spellings of one query have in common."""
    return " ".join(text.lower().split())
