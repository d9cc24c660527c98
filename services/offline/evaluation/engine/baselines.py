"""Baselines without a sequence model: popularity, neighbours of items and of sessions, EASE, and matrix factorisation.

The library `implicit` computes item neighbours and ALS. Session neighbours and EASE are written from their papers,
because no maintained library for them installs with NumPy 2.

Letters: B events of a batch, U users, X items, S sessions.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.algorithms.scoring.neighbours import ItemNeighbours
from services.offline.datasets import Interactions
from services.offline.evaluation.engine.ranked_events import EventScorer
from services.offline.training.neighbours import learn_neighbours, votes_before
from services.offline.training.sequences import Histories, IntArray

FloatArray = npt.NDArray[np.floating]
Value = int | float | str
_DAY_S = 86_400
_HOUR_S = 3_600
_GIB = 1 << 30


class Baseline(EventScorer, Protocol):
    """Learns from training events alone; equal settings and data give equal scores.

    Histories to score have the vocabulary of the training events. Every event to score needs an earlier one.
    """

    def fit(self, train: Interactions) -> None:
        """Learn from these events only."""


@dataclass(kw_only=True)
class Popularity:
    """Scores items by their number of training events."""

    _counts: FloatArray = field(init=False, repr=False)

    def fit(self, train: Interactions) -> None:
        self._counts = train.item_counts().astype(np.float64)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> FloatArray:
        return np.repeat(self._counts[None], len(events), axis=0)


@dataclass(kw_only=True)
class RecentPopularity:
    """Scores items by their number of training events in the `days` before the request; all training events break ties.

    A request after the training data uses its last `days`. Without times, each user's last `events` training events
    count.
    """

    days: float = 30.0
    events: int = 3
    _train: Interactions = field(init=False, repr=False)
    _tie_break: FloatArray = field(init=False, repr=False)

    def fit(self, train: Interactions) -> None:
        self._train = train
        counts = train.item_counts()
        self._tie_break = counts / (counts.max(initial=0) + 1.0)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> FloatArray:
        if not self._train.has_times:
            return np.repeat((self._of_last_events() + self._tie_break)[None], len(events), axis=0)
        times = self._train.timestamps
        clock = np.minimum(histories.times[events], times[-1] + 1 if len(times) else 0)
        begin = np.searchsorted(times, clock - int(self.days * _DAY_S), side="left")
        end = np.searchsorted(times, clock, side="left")
        items, num_items = self._train.items, self._train.num_items
        counts = [np.bincount(items[a:b], minlength=num_items) for a, b in zip(begin, end, strict=True)]
        return np.stack(counts) + self._tie_break

    def _of_last_events(self) -> npt.NDArray[np.int64]:
        rows, offsets = self._train.by_user()
        before_end = np.repeat(offsets[1:], np.diff(offsets)) - np.arange(len(rows))
        last = self._train.items[rows[before_end <= self.events]]
        return np.bincount(last, minlength=self._train.num_items).astype(np.int64)


@dataclass(kw_only=True)
class ServedNeighbours:
    """A bundle's item neighbours without its model. Items without a vote rank after the others, by popularity."""

    _neighbours: ItemNeighbours = field(init=False, repr=False)
    _counts: FloatArray = field(init=False, repr=False)

    def fit(self, train: Interactions, learnt: ItemNeighbours | None = None) -> None:
        """Learn the neighbours, or use `learnt`, the neighbours of the same events."""
        self._neighbours, self._counts = learnt or learn_neighbours(train), train.item_counts().astype(np.float64)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> FloatArray:
        return _by_popularity_where_zero(votes_before(self._neighbours, histories, events, users), self._counts)


@dataclass(kw_only=True)
class ItemKnn:
    """Scores an item by the sum of its similarities to the history's items.

    `implicit` computes similarities ("cosine", "tf-idf" or "bm25") of each item's nearest `neighbours`. The item r
    positions back has the weight recency^r. Items without a neighbour follow by popularity.
    """

    weights: str = "tf-idf"
    neighbours: int = 200
    recency: float = 1.0
    _similarity: Any = field(init=False, repr=False)
    _counts: FloatArray = field(init=False, repr=False)

    def fit(self, train: Interactions) -> None:
        from implicit.nearest_neighbours import BM25Recommender, CosineRecommender, TFIDFRecommender

        kinds = {"cosine": CosineRecommender, "tf-idf": TFIDFRecommender, "bm25": BM25Recommender}
        # An item is its own nearest neighbour.
        model = kinds[self.weights](K=self.neighbours + 1)
        with warnings.catch_warnings():
            # `implicit` warns about the matrix format that its own weighting returns.
            warnings.filterwarnings("ignore", message="Method expects CSR input")
            model.fit(_user_items(train), show_progress=False)
        self._similarity = model.similarity
        self._counts = train.item_counts().astype(np.float64)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> FloatArray:
        history = _history_matrix(histories, events, users, len(self._counts), recency=self.recency)
        return _by_popularity_where_zero((history @ self._similarity).toarray(), self._counts)


@dataclass(kw_only=True)
class SessionNeighbours:
    """VMIS-kNN: past sessions that share items with the user's last ones vote for their other items.

    A user's training events are cut into sessions of at most `session_events`, and at pauses of more than `pause_hours`
    if times are known. The user's last `window` events are the evolving session s of length L. The item p positions
    before the last has the weight (L - p) / (distinct items of s). Of the `recent_sessions` most recent
    sessions that share an item with s, the `neighbours` with the largest summed weight r vote. An item's score is the
    sum over voting sessions that contain it of max(0, 1 - 0.1 (q + 1)) r log(S / S_i): q is the smallest p of
    a shared item, and S_i sessions contain the item. Of sessions with equal r, the more recent one votes. Without
    times, sessions have a random order, the same in every run. Items without a vote rank last, by popularity.
    Source: Kersbergen, Sprangers, Schelter: "Serenade - Low-Latency Session-Based Recommendation in e-Commerce at
    Scale", SIGMOD 2022, algorithm 2; sessions are sets here.
    """

    neighbours: int = 200
    recent_sessions: int = 1_000
    window: int = 9
    session_events: int = 50
    pause_hours: float = 24.0
    _counts: FloatArray = field(init=False, repr=False)
    _idf: FloatArray = field(init=False, repr=False)
    _session_items: Any = field(init=False, repr=False)
    _item_sessions: Any = field(init=False, repr=False)

    def fit(self, train: Interactions) -> None:
        sessions, items, num_sessions = self._sessions(train)
        self._session_items = _pairs(sessions, items, (num_sessions, train.num_items))
        self._item_sessions = self._session_items.T.tocsr()
        self._idf = np.log(num_sessions / np.maximum(np.diff(self._item_sessions.indptr), 1))
        self._counts = train.item_counts().astype(np.float64)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> FloatArray:
        starts = np.maximum(histories.offsets[users], events - self.window)
        votes = [self._votes(histories.items[start:event]) for start, event in zip(starts, events, strict=True)]
        return _by_popularity_where_zero(np.stack(votes), self._counts)

    def _votes(self, evolving: IntArray) -> FloatArray:
        newest_first, places = np.unique(evolving[::-1], return_index=True)
        order = np.argsort(places)
        items, places = newest_first[order], places[order]
        # Sessions are numbered from the oldest, so the last are the most recent. Cutting each list changes no score;
        # without it, an event takes 5 ms instead of .2 (900,000 events of 6,000 users).
        begins, ends = self._item_sessions.indptr[items], self._item_sessions.indptr[items + 1]
        begins = np.maximum(begins, ends - self.recent_sessions)
        shared = [self._item_sessions.indices[begin:end] for begin, end in zip(begins, ends, strict=True)]
        if not any(map(len, shared)):
            return np.zeros(len(self._idf))
        owners = np.repeat(np.arange(len(items)), ends - begins)
        found, first, group = np.unique(np.concatenate(shared), return_index=True, return_inverse=True)
        similarity = np.bincount(group, weights=(len(evolving) - places[owners]) / len(items))
        match = places[owners[first]]
        found, similarity, match = (column[-self.recent_sessions :] for column in (found, similarity, match))
        best = np.lexsort((-found, -similarity))[: self.neighbours]
        voters = np.maximum(1 - 0.1 * (match[best] + 1), 0) * similarity[best]
        return np.asarray(voters @ self._session_items[found[best]] * self._idf)

    def _sessions(self, train: Interactions) -> tuple[IntArray, IntArray, int]:
        rows, _ = train.by_user()
        users, times = train.users[rows], train.timestamps[rows]
        begins = np.ones(len(rows), dtype=bool)
        begins[1:] = users[1:] != users[:-1]
        if train.has_times:
            begins[1:] |= np.diff(times) > self.pause_hours * _HOUR_S
        run = np.flatnonzero(begins)[np.cumsum(begins) - 1]
        begins |= (np.arange(len(rows)) - run) % self.session_events == 0
        number = np.cumsum(begins) - 1
        num_sessions = int(begins.sum())
        if train.has_times:
            last_times = times[np.append(np.flatnonzero(begins)[1:], len(rows)) - 1]
            rank = np.argsort(np.argsort(last_times, kind="stable"))
        else:
            rank = np.random.default_rng(0).permutation(num_sessions)
        return rank[number].astype(np.int64), train.items[rows].astype(np.int64), num_sessions


@dataclass(kw_only=True)
class Ease:
    """Predicts each item from all others by one linear model with an L2 penalty, in closed form.

    B = I - P / diag(P) with P = (X^T X + `penalty` I)^-1; a user's scores are the history's items (each once) times B.
    Source: Steck, "Embarrassingly Shallow Autoencoders for Sparse Data", WWW 2019, arXiv:1905.03375, equation 8.
    Cost: O(X^3) time, and 8 X^2 bytes, of which `fit` keeps half. Raises (fit): ValueError above `memory_limit_gib`.
    """

    penalty: float = 500.0
    memory_limit_gib: float = 8.0
    _matrix: npt.NDArray[np.float32] = field(init=False, repr=False)
    _counts: FloatArray = field(init=False, repr=False)

    def fit(self, train: Interactions) -> None:
        import torch

        needed_gib = 8 * train.num_items**2 / _GIB
        if needed_gib > self.memory_limit_gib:
            raise ValueError(
                f"EASE of {train.num_items:,} items needs {needed_gib:.1f} GiB (two matrices, items by items); "
                f"allowed: memory_limit_gib={self.memory_limit_gib:g}"
            )
        taken = _user_items(train)
        gram = torch.from_numpy((taken.T @ taken).toarray().astype(np.float32, copy=False))
        gram.diagonal().add_(self.penalty)
        factor = torch.linalg.cholesky(gram)
        del gram
        inverse = torch.cholesky_inverse(factor)
        del factor
        inverse.div_(-inverse.diagonal().clone())
        inverse.fill_diagonal_(0.0)
        # LAPACK returns column-major order, which the sparse product would copy to row-major order for every batch.
        self._matrix = np.ascontiguousarray(inverse.numpy())
        self._counts = train.item_counts().astype(np.float64)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> FloatArray:
        history = _history_matrix(histories, events, users, len(self._counts), distinct=True)
        return _by_popularity_where_zero(history @ self._matrix, self._counts)


@dataclass(kw_only=True)
class ImplicitAls:
    """Matrix factorisation by alternating least squares (`implicit`); the user's vector is solved from the history.

    A taken item has the confidence `alpha`, every other 1; the user's own training vector is never used.
    """

    factors: int = 64
    regularization: float = 0.01
    alpha: float = 1.0
    iterations: int = 15
    seed: int = 0
    _model: Any = field(init=False, repr=False)
    _counts: FloatArray = field(init=False, repr=False)

    def fit(self, train: Interactions) -> None:
        from implicit.cpu.als import AlternatingLeastSquares
        from threadpoolctl import threadpool_limits

        # `implicit` has its own threads. If BLAS also has threads, `implicit` warns and is many times slower.
        with threadpool_limits(1, "blas"):
            self._model = AlternatingLeastSquares(
                factors=self.factors,
                regularization=self.regularization,
                alpha=self.alpha,
                iterations=self.iterations,
                random_state=self.seed,
            )
            self._model.fit(_user_items(train), show_progress=False)
        self._counts = train.item_counts().astype(np.float64)

    def scores(self, histories: Histories, events: IntArray, users: IntArray) -> FloatArray:
        history = _history_matrix(histories, events, users, len(self._counts), distinct=True)
        vectors = self._model.recalculate_user(np.arange(len(events)), history)
        return _by_popularity_where_zero(vectors @ self._model.item_factors.T, self._counts)


_CLASSES: Mapping[str, Callable[..., Baseline]] = {
    "popularity": Popularity,
    "recent-popularity": RecentPopularity,
    "item-knn": ItemKnn,
    "session-knn": SessionNeighbours,
    "ease": Ease,
    "als": ImplicitAls,
    "neighbours": ServedNeighbours,
}


def make_baseline(name: str, settings: Mapping[str, Value] | None = None) -> Baseline:
    """Return an unfitted baseline of GRIDS; omitted settings have their defaults."""
    return _CLASSES[name](**(settings or {}))


def _user_items(train: Interactions) -> Any:
    """Return (U, X): 1 if the user took the item."""
    return _pairs(train.users, train.items, (train.num_users, train.num_items)).astype(np.float32)


def _pairs(rows: npt.NDArray[np.integer], columns: npt.NDArray[np.integer], shape: tuple[int, int]) -> Any:
    """Return a matrix with 1 at each pair, however often it occurs."""
    from scipy import sparse

    matrix = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)
    matrix.data[:] = 1.0
    return matrix


def _history_matrix(
    histories: Histories,
    events: IntArray,
    users: IntArray,
    num_items: int,
    *,
    recency: float = 1.0,
    distinct: bool = False,
) -> Any:
    """Return (B, X): an item r positions back adds recency^r; if `distinct`, every item has 1."""
    from scipy import sparse

    begins = histories.offsets[users]
    lengths = events - begins
    rows = np.repeat(np.arange(len(events)), lengths)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    weights = recency ** (lengths[rows] - 1 - places).astype(np.float64)
    items = histories.items[begins[rows] + places]
    matrix = sparse.csr_matrix((weights.astype(np.float32), (rows, items)), shape=(len(events), num_items))
    if distinct:
        matrix.data[:] = 1.0
    return matrix


def _by_popularity_where_zero(scores: FloatArray, counts: FloatArray) -> FloatArray:
    """Give items of score 0 a score from -1 to 0 by popularity."""
    return np.where(scores == 0, counts / (counts.max(initial=0) + 1.0) - 1.0, scores)


# At most six settings, about as many as a mixture's arm tries.
GRIDS: Mapping[str, Sequence[Mapping[str, Value]]] = {
    "popularity": ({},),
    "recent-popularity": tuple(
        {"days": days, "events": events} for days, events in ((1, 1), (3, 2), (7, 3), (30, 5), (90, 10), (365, 20))
    ),
    "item-knn": tuple(
        {"weights": weights, "recency": recency} for weights in ("cosine", "tf-idf", "bm25") for recency in (1.0, 0.8)
    ),
    "session-knn": tuple(
        {"neighbours": neighbours, "recent_sessions": recent, "session_events": events}
        for neighbours, recent in ((100, 500), (500, 2_500))
        for events in (10, 50, 200)
    ),
    "ease": tuple({"penalty": penalty} for penalty in (10.0, 50.0, 200.0, 500.0, 1_000.0, 4_000.0)),
    "als": tuple({"factors": factors, "alpha": alpha} for factors in (64, 256) for alpha in (1.0, 5.0, 40.0)),
    "neighbours": ({},),
}
