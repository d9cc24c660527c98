"""Who answers text questions in `freshet bench text`: one form for all of them, and the baselines that train nothing.

BM25 over the documents, MiniLM's vectors by their dot product, and the same with PEFA-XS and PEFA-XL, whose lambda and
k are chosen on held-out training questions. They do not know how answers are judged.

Letters: B questions, n documents, d width, K results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.models.sentence_encoder import MiniLM, model_folder
from services.algorithms.scoring.states import FloatArray
from services.algorithms.text.lexical import LexicalIndex
from services.offline.datasets.texts import TextCollection
from services.offline.evaluation.common.embeddings import EmbeddingSource, sentence_vectors
from services.offline.evaluation.common.recall import MOST
from services.offline.evaluation.pefa import sweep
from services.offline.evaluation.pefa.data import DOCUMENT_CHARACTERS, TextSet, text_set
from services.offline.evaluation.pefa.paper import nearest_queries, xl_scores, xl_votes

Ranked = Sequence[npt.NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What an answerer is made of: the texts, where vectors are kept, how long it may take, and who hears of it."""

    texts: TextCollection
    source: EmbeddingSource
    quick: bool
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answering:
    """An answerer ready to be asked. `answer`: the best 100 document rows of each question, best first; `nbytes`: what
    it holds to answer; `vocabulary`: tokens of its output layer; `notes`: more columns for the report."""

    answer: Callable[[Sequence[str]], Ranked]
    nbytes: int
    vocabulary: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answerer:
    """Rows that are made together, by name; `seeded`: another seed makes others."""

    name: str
    make: Callable[[Asked, int], dict[str, Answering]]
    seeded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Documents as vectors (n, d), and what makes vectors (B, d) of questions; the dot product ranks."""

    documents: FloatArray
    encode: Callable[[Sequence[str]], FloatArray]


def bm25(asked: Asked, seed: int) -> dict[str, Answering]:
    """The words of the question in the words of the whole documents."""
    index = LexicalIndex(asked.texts.documents)

    def answer(texts: Sequence[str]) -> Ranked:
        return [index.search(text, MOST)[0] for text in texts]

    return {"BM25": Answering(answer=answer, nbytes=index.nbytes)}


def minilm(asked: Asked, seed: int) -> dict[str, Answering]:
    """MiniLM's vectors as they come: alone, with PEFA-XS and with PEFA-XL."""
    encoder = MiniLM(model_folder())

    def encode(texts: Sequence[str]) -> FloatArray:
        # Many questions are a set's, whose vectors are kept; a single one is timed and therefore computed.
        vectors = sentence_vectors(asked.source, texts) if len(texts) > 1 else encoder.encode(texts)
        return np.ascontiguousarray(vectors, dtype=np.float32)

    cut = [text[:DOCUMENT_CHARACTERS] for text in asked.texts.documents]
    return with_pefa("MiniLM, dot product", asked, Encoded(documents=encode(cut), encode=encode), seed)


BASELINES = (Answerer(name="BM25", make=bm25), Answerer(name="MiniLM", make=minilm))


def with_pefa(name: str, asked: Asked, encoded: Encoded, seed: int) -> dict[str, Answering]:
    """The dot product alone; with document vectors moved towards the training questions (XS, arXiv:2312.02429 equation
    8); with the votes of the nearest training questions (XL, equation 9). lambda and k are chosen on held-out training
    questions."""
    data = text_set(asked.texts, encoded.documents, encoded.encode)
    pairs = sweep.relevance(data.train, len(data.documents))
    xs, xl = (_chosen(asked, data, method, seed) for method in ("xs", "xl"))
    moved = sweep.xs_vectors(data.documents, data.train, xs)

    def voted(queries: FloatArray) -> npt.NDArray[Any]:
        rows, products = nearest_queries(queries, data.train.queries, xl.k)
        return xl_scores(queries @ data.documents.T, xl_votes(rows, products, pairs, k=xl.k), xl.share)

    def answering(
        scores: Callable[[FloatArray], npt.NDArray[Any]], nbytes: int, setting: sweep.Setting | None = None
    ) -> Answering:
        def answer(texts: Sequence[str]) -> Ranked:
            return list(best_rows(scores(encoded.encode(texts))))

        return Answering(answer=answer, nbytes=nbytes, notes={"setting": setting.text} if setting else {})

    held = data.documents.nbytes
    remembered = held + data.train.queries.nbytes + data.train.pairs.nbytes
    return {
        name: answering(lambda queries: queries @ data.documents.T, held),
        f"{name} + PEFA-XS": answering(lambda queries: queries @ moved.T, held, xs),
        f"{name} + PEFA-XL": answering(voted, remembered, xl),
    }


def best_rows(scores: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The first 100 of each row of scores (B, n), ties by document row."""
    order: npt.NDArray[np.int64] = np.argsort(-scores, axis=1, kind="stable")[:, :MOST]
    return order


def _chosen(asked: Asked, data: TextSet, method: sweep.Method, seed: int) -> sweep.Setting:
    shares, neighbours = (sweep.PAPER_SHARES, (4, 32)) if asked.quick else (sweep.SHARES, sweep.NEIGHBOURS)
    tried = [one for one in sweep.grid(shares, neighbours) if one.method == method and not one.printed]
    return sweep.chosen(data, tried, seed=seed, say=asked.say)[method, False]
