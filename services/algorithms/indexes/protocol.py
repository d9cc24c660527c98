"""What every top-K index offers: `search` for the answer with its certificate, `first_stage` for a pool.

Item indices are dense row numbers; item ids live above. Scores and gaps are in similarity units s = tau * phi. A
filter is a mask that acts inside the scan, so it never starves an answer: fewer than K allowed items make a shorter
answer, never a padded or a wrong one.

Letters: B queries, X items, K results, N pool size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.states import QueryStates

Indices = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NOTHING = -1  # an item index beyond the end of a shorter answer


@dataclass(frozen=True, slots=True)
class Certificate:
    """How far an answer may be from the exact top K: no left-out item scores more than `gap` above the K-th.

    0 means proven exact; None means no proof.
    """

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
    """The certificate of an answer from a pool.

    `bound`: no allowed item outside the pool scores above it; -inf when nothing was left out, None without proof.
    `kth_score`: the K-th best score within the pool; None when the pool held fewer than K items.
    """
    if bound is None:
        return ESTIMATE
    if bound == -math.inf:
        return EXACT
    if kth_score is None:
        return ESTIMATE  # items are missing from the answer, not merely worse ones in it
    if bound < kth_score:
        return EXACT
    # A left-out item that ties with the K-th could come first by id, so equality is no proof of exactness.
    return Certificate(max(bound - kth_score, np.finfo(np.float64).tiny))


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a search: its name, seconds of wall clock for all B queries, and items touched per query (B,).

    The names that algorithms share: "first_stage", "full" (s in float32), "float64" (s again, where float32 can't
    tell).
    """

    name: str
    seconds: float
    touched: Indices


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """Answers to B queries, best first, ties by item id.

    Shapes: item_indices (B, K'), scores (B, K') float64 with K' = min(K, X); a shorter answer ends in index -1 and
    score -inf. One certificate per query. `passes` says, in order, where the time went.
    """

    item_indices: Indices
    scores: Scores
    certificates: tuple[Certificate, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """First-stage pools of B queries, best first by the first stage's own score, ties by item id.

    Shapes: item_indices (B, N'), scores (B, N') as in TopK; bounds (B,): no allowed item outside the pool has
    s = tau * phi above it; -inf when nothing was left out, NaN when there is no proof. `passes` as in TopK.
    """

    item_indices: Indices
    scores: Scores
    bounds: Scores
    passes: tuple[Pass, ...]

    def bound(self, query: int) -> float | None:
        """The bound of one query, or None without proof."""
        value = float(self.bounds[query])
        return None if math.isnan(value) else value


Answer = TypeVar("Answer", TopK, Pool)


class Index(Protocol):
    """A top-K algorithm over one catalogue. Implementations are safe to use from several threads."""

    @property
    def name(self) -> str:
        """What a request's `algorithm` calls it."""

    @property
    def num_items(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of everything held for the items."""

    def search(self, queries: QueryStates, k: int, allowed: Mask | None = None) -> TopK:
        """The top `k` of s among the allowed items: `allowed` (X,) or (B, X), None for all.

        Raises: ValueError naming what is wrong with `k`, `allowed` or the queries' shapes.
        """

    def first_stage(self, queries: QueryStates, size: int, allowed: Mask | None = None) -> Pool:
        """A pool of `size` items by this algorithm's first stage alone. Raises as `search` does."""


@runtime_checkable
class GapIndex(Protocol):
    """An index that does less where it may leave something out."""

    def search_within(self, queries: QueryStates, k: int, allowed: Mask | None, max_gap: float) -> TopK:
        """As `Index.search`; no left-out item scores more than `max_gap` (at least 0) above the K-th answered one."""


def search_within(index: Index, queries: QueryStates, k: int, allowed: Mask | None, max_gap: float) -> TopK:
    """The index's answer, with as little work as `max_gap` allows it; the certificates say what it proved."""
    if max_gap and isinstance(index, GapIndex):
        return index.search_within(queries, k, allowed, max_gap)
    return index.search(queries, k, allowed)


def check_request(*, k: int, allowed: Mask | None, num_queries: int, num_items: int) -> None:
    """Raise ValueError, naming the value and what is allowed, unless k >= 1 and the mask fits."""
    if k < 1:
        raise ValueError(f"k={k} allowed: at least 1")
    if allowed is None:
        return
    if allowed.dtype != np.bool_:
        raise ValueError(f"allowed has dtype {allowed.dtype}; expected bool")
    if allowed.shape not in ((num_items,), (num_queries, num_items)):
        raise ValueError(f"allowed has shape {allowed.shape}; expected ({num_items},) or ({num_queries}, {num_items})")


def check_tie_ranks(tie_ranks: npt.NDArray[np.integer] | None, num_items: int) -> Indices:
    """Return the rank of each item's id in id order (X,), which settles ties; the row number itself when not given.

    Ranks that ascend, as a catalogue's do, are neither hashed nor copied: `exact` checks the same ones eight times.
    """
    if num_items < 1:
        raise ValueError("the index is empty: num_items=0 allowed: at least 1")
    if tie_ranks is None:
        return np.arange(num_items, dtype=np.int64)
    is_ascending = tie_ranks.shape == (num_items,) and bool((tie_ranks[1:] > tie_ranks[:-1]).all())
    if not is_ascending and (tie_ranks.shape != (num_items,) or len(np.unique(tie_ranks)) != num_items):
        raise ValueError(f"tie_ranks has shape {tie_ranks.shape}; expected {num_items} distinct ranks")
    return tie_ranks.astype(np.int64, copy=False)


def empty_answer(num_queries: int, width: int) -> tuple[Indices, Scores]:
    """Item indices of -1 and scores of -inf, (B, width) each, to be filled from the left."""
    return np.full((num_queries, width), NOTHING, dtype=np.int64), np.full((num_queries, width), -np.inf)


def asked_again(
    answer: Answer,
    short: Indices,
    queries: QueryStates,
    allowed: Mask | None,
    ask: Callable[[QueryStates, Mask | None], Answer],
) -> Answer:
    """`answer`, where queries number `short` (b,) have what `ask` says of them alone: of the same width and passes."""
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
    """Queries start..stop-1."""
    return queries.take(slice(start, stop))
