"""Questions and documents as vectors, for PEFA.

Letters: n documents, m training queries, B test queries, E pairs, d width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

from services.algorithms.scoring.states import FloatArray
from services.offline.datasets.texts import Question, load_texts
from services.offline.evaluation.common.embeddings import EmbeddingSource, sentence_vectors
from services.offline.evaluation.common.recall import Pairs
from services.offline.evaluation.pefa.paper import relevance

# The recalls that choose lambda and k, by set.
DECIDED_BY = {"scifact": ("recall@10", "recall@100"), "medquad": ("recall@1", "recall@10")}
NAMES = tuple(DECIDED_BY)
DOCUMENT_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Queries with their relevant documents.

    Shapes: queries (m, d) unit norm; pairs (E, 2) of (query row, document row), each once.
    """

    queries: FloatArray
    pairs: Pairs

    def __len__(self) -> int:
        return len(self.queries)

    def relevant(self, num_documents: int) -> sparse.csr_matrix:
        """Return the relevance matrix Y (m, n)."""
        return relevance(self.pairs, num_queries=len(self), num_passages=num_documents)

    def only(self, rows: npt.NDArray[np.bool_]) -> "Judged":
        """Return the queries in `rows` (m,), renumbered."""
        new_rows = np.cumsum(rows) - 1
        kept = self.pairs[rows[self.pairs[:, 0]]]
        return Judged(queries=self.queries[rows], pairs=np.column_stack([new_rows[kept[:, 0]], kept[:, 1]]))


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSet:
    """One corpus.

    unseen (B,): no training query has this text. tested_are_trained: every tested document has training queries, also
    in folds.
    """

    name: str
    documents: FloatArray
    train: Judged
    test: Judged
    unseen: npt.NDArray[np.bool_]
    tested_are_trained: bool


def folds(data: TextSet, *, count: int, seed: int) -> Iterator[tuple[Judged, Judged]]:
    """Yield `count` disjoint (fitted, held out) parts of the training queries; no query is held out twice.

    With `tested_are_trained` a query is not held out if one of its documents has no other fitted query.
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
    """Return a share of the pairs, drawn uniformly (paper, section 5.4), without queries that have no pair.

    Raises: ValueError if `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share}; allowed: above 0, at most 1")
    count = max(1, round(share * len(train.pairs)))
    chosen = np.sort(np.random.default_rng(seed).permutation(len(train.pairs))[:count])
    left = Judged(queries=train.queries, pairs=train.pairs[chosen])
    return left.only(np.isin(np.arange(len(train)), left.pairs[:, 0]))


def known(name: str) -> str:
    """Return the name. Raises: ValueError if it is unknown."""
    if name not in NAMES:
        raise ValueError(f"data={name!r}; allowed: {', '.join(NAMES)}")
    return name


def load(name: str, source: EmbeddingSource) -> TextSet:
    """Load a set, and encode its queries and its shortened documents with MiniLM.

    Raises: ValueError for an unknown name, a missing file or missing weights.
    """
    texts = load_texts(known(name), source.locator)

    def encode(texts: Sequence[str]) -> FloatArray:
        return np.ascontiguousarray(sentence_vectors(source, texts), dtype=np.float32)

    trained = {_same(text) for text, _ in texts.train}
    return TextSet(
        name=texts.name,
        documents=encode([text[:DOCUMENT_CHARACTERS] for text in texts.documents]),
        train=_judged(encode, texts.train),
        test=_judged(encode, texts.test),
        unseen=np.array([_same(text) not in trained for text, _ in texts.test], dtype=bool),
        tested_are_trained=texts.tested_are_trained,
    )


def _same(text: str) -> str:
    """Questions that differ only in case and spaces are equal."""
    return " ".join(text.lower().split())


def _judged(encode: Callable[[Sequence[str]], FloatArray], questions: Sequence[Question]) -> Judged:
    pairs = [(row, document) for row, (_, documents) in enumerate(questions) for document in documents]
    return Judged(
        queries=encode([text for text, _ in questions]),
        pairs=np.unique(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=0),
    )
