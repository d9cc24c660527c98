"""The protocol of a top-K index: `search` for the answer with its certificate, `first_stage` for a pool.

Item indices are row numbers. Rows are in order of item ids, so ties go to the lower row. Scores and gaps are in
similarity units s = tau * phi. A filter is a mask applied inside the scan: with fewer than K allowed items the answer
is shorter.

Letters: B queries, X items, K results, N pool size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import QueryStates

Indices = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NOTHING = -1  # pads item indices of an answer with fewer than K items


@dataclass(frozen=True, slots=True)
class Certificate:
    """No omitted item scores more than `gap` above the K-th result. 0 means exact, None no proof."""

    gap: float | None

    @property
    def kind(self) -> Literal["exact", "bounded", "estimate"]:
        if self.gap is None:
            return "estimate"
        return "exact" if self.gap == 0 else "bounded"

    def proves(self, max_gap: float) -> bool:
        """Whether the gap is proven to be at most `max_gap`."""
        return self.gap is not None and self.gap <= max_gap


EXACT = Certificate(0.0)
ESTIMATE = Certificate(None)


def certificate(*, bound: float | None, kth_score: float | None) -> Certificate:
    """The certificate of a pool's answer.

    bound: no allowed item outside the pool scores above it; -inf if none was omitted, None without proof. kth_score:
    None if the pool had fewer than K items.
    """
    if bound is None:
        return ESTIMATE
    if bound == -math.inf:
        return EXACT
    if kth_score is None:
        return ESTIMATE  # fewer than K items, so no K-th score
    if bound < kth_score:
        return EXACT
    # An omitted item that ties with the K-th could precede it by id, so equality does not prove exactness.
    return Certificate(max(bound - kth_score, np.finfo(np.float64).tiny))


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a search: its name, seconds of wall clock for B queries, and items touched per query (B,).

    Common names: "first_stage", "full" (s in float32), "float64" (s of items whose order float32 cannot decide).
    """

    name: str
    seconds: float
    touched: Indices


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """Answers to B queries, best first, ties by row, with one certificate per query.

    Shapes: item_indices (B, K'), scores (B, K') float64 with K' = min(K, X); a shorter answer ends in index -1 and
    score -inf. passes: in order.
    """

    item_indices: Indices
    scores: Scores
    certificates: tuple[Certificate, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """First-stage pools of B queries, best first by the first stage's own score, ties by row.

    Shapes: item_indices (B, N'), scores (B, N') as in TopK; bounds (B,): no allowed item outside the pool has s above
    it; -inf if none was omitted, NaN without proof.
    """

    item_indices: Indices
    scores: Scores
    bounds: Scores
    passes: tuple[Pass, ...]

    def bound(self, query: int) -> float | None:
        """One query's bound, None without proof."""
        value = float(self.bounds[query])
        return None if math.isnan(value) else value


Answer = TypeVar("Answer", TopK, Pool)


class Index(Protocol):
    """A thread-safe top-K algorithm over one catalogue."""

    @property
    def name(self) -> str:
        """The algorithm's name in requests."""

    @property
    def num_items(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of items and structures."""

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None, max_gap: float = 0.0) -> TopK:
        """The top `k` of s among the allowed items. allowed: (X,) or (B, X), None for all.

        max_gap: some indexes save work if omitted items may score up to this much, at least 0, above the K-th result.
        Raises: ValueError for invalid `k`, `allowed` or shapes of queries.
        """

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """A pool of `size` items by the first stage alone. Raises: as `search`."""


def check_request(*, k: int, allowed: Mask | None, num_queries: int, num_items: int) -> None:
    """Raise ValueError unless k >= 1 and the mask fits."""
    if k < 1:
        raise ValueError(f"k={k} allowed: at least 1")
    if allowed is None:
        return
    if allowed.dtype != np.bool_:
        raise ValueError(f"allowed has dtype {allowed.dtype}; expected bool")
    if allowed.shape not in ((num_items,), (num_queries, num_items)):
        raise ValueError(f"allowed has shape {allowed.shape}; expected ({num_items},) or ({num_queries}, {num_items})")


def empty_answer(num_queries: int, width: int) -> tuple[Indices, Scores]:
    """Item indices of -1 and scores of -inf, (B, width) each."""
    return np.full((num_queries, width), NOTHING, dtype=np.int64), np.full((num_queries, width), -np.inf)


def asked_again(
    answer: Answer,
    short: Indices,
    queries: QueryStates,
    allowed: Mask | None,
    ask: Callable[[QueryStates, Mask | None], Answer],
) -> Answer:
    """Ask again for the queries `short` (b,) and replace their results in `answer`. `ask` must return the same width
    and passes.
    """
    if not len(short):
        return answer
    others = ask(queries.take(short), allowed if allowed is None or allowed.ndim == 1 else allowed[short])
    item_indices, scores = answer.item_indices.copy(), answer.scores.copy()
    item_indices[short], scores[short] = others.item_indices, others.scores
    passes = []
    for before, after in zip(answer.passes, others.passes, strict=True):
        touched = before.touched.copy()
        touched[short] = after.touched
        passes.append(Pass(before.name, before.seconds + after.seconds, touched))
    proof: dict[str, Any] = {}
    if isinstance(answer, TopK) and isinstance(others, TopK):
        changed = dict(zip(short.tolist(), others.certificates, strict=True))
        proof["certificates"] = tuple(changed.get(query, old) for query, old in enumerate(answer.certificates))
    elif isinstance(answer, Pool) and isinstance(others, Pool):
        proof["bounds"] = answer.bounds.copy()
        proof["bounds"][short] = others.bounds
    return replace(answer, item_indices=item_indices, scores=scores, passes=tuple(passes), **proof)


def take_queries(queries: QueryStates, start: int, stop: int) -> QueryStates:
    return queries.take(slice(start, stop))
