"""Audit a small share of live searches by brute force in the background.

An audit measures recall, whether the certificate or bound held, and its slack. One runs at a time; meanwhile no search
is sampled.
"""

import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import structlog

from services.algorithms.indexes.protocol import Certificate, Scores
from services.algorithms.items.live_catalogue import LiveCatalogue, Served
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import QueryStates
from services.algorithms.scoring.voted_answers import joined_answer, num_negative
from services.candidates.domain import Stage

log = structlog.get_logger()

# Recall counts this many best items, or k if fewer.
RECALL_K = 100
# The audits' brute-force algorithm; requests cannot name it.
TRUTH = "truth"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One live answer: item ids (n,), best first, with scores, and the bound or certificate.

    votes: for each item, None if nothing votes. Scores of a FULL answer are then model_share * s + (1 - model_share) *
    vote.
    """

    algorithm: str
    stage: Stage
    query: QueryStates
    k: int
    filter: ItemFilter
    served: Served
    item_ids: Sequence[str]
    scores: Scores
    bound: float | None
    certificate: Certificate | None
    votes: Mapping[str, float] | None = None
    model_share: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """recall: the share of the true best `RECALL_K` (or k) in the answer. promised: the answer's bound on left-out
    items, None without proof. true: the highest left-out score, -inf if none was left out.
    """

    algorithm: str
    stage: Stage
    recall: float
    promised: float | None
    true: float

    @property
    def held(self) -> bool | None:
        """Whether the promise held; None without one."""
        return None if self.promised is None else self.true <= self.promised


def examine(catalogue: LiveCatalogue, answered: Answered) -> Finding:
    """Answer from the same version by brute force, and compare."""
    # One more than answered, so that one was left out.
    best_ids, best_scores = _truth(catalogue, answered, len(answered.item_ids) + 1)
    there = frozenset(answered.item_ids)
    found = np.array([item_id in there for item_id in best_ids], dtype=bool)
    wanted = min(RECALL_K, answered.k, len(best_ids))
    left_out = best_scores[~found]
    return Finding(
        algorithm=answered.algorithm,
        stage=answered.stage,
        recall=float(found[:wanted].mean()) if wanted else 1.0,
        promised=_promise(answered),
        true=float(left_out[0]) if len(left_out) else -math.inf,
    )


def _truth(catalogue: LiveCatalogue, answered: Answered, count: int) -> tuple[Sequence[str], Scores]:
    """The true best `count`: by final score for a FULL answer with votes, else by s."""
    votes = answered.votes if answered.stage is Stage.FULL else None
    more = 0 if votes is None else num_negative([votes])
    best = catalogue.index.search(
        answered.query, count + more, answered.filter, algorithm=TRUTH, version=answered.served.version
    )
    ids, scores = best.item_ids[0], best.scores[0][: len(best.item_ids[0])]
    if votes is None:
        return ids, scores
    joined = joined_answer(
        catalogue,
        answered.served,
        answered.query,
        0,
        (ids, scores, best.certificates[0]),
        votes,
        k=count,
        wanted=answered.filter,
        model_share=answered.model_share,
    )
    return joined.item_ids, joined.scores


def _promise(answered: Answered) -> float | None:
    if answered.stage is Stage.FIRST:
        return answered.bound
    certificate = answered.certificate
    if certificate is None or certificate.gap is None:
        return None
    if len(answered.scores) < answered.k:
        return -math.inf  # a shorter proven answer: nothing else matches
    return float(answered.scores[-1]) + certificate.gap


class Audit:
    """Samples answers and audits them in a separate thread."""

    def __init__(
        self, catalogue: LiveCatalogue, *, share: float, report: Callable[[Finding], None], seed: int | None = None
    ) -> None:
        """share: of answers to sample. report: called from the audit's thread.

        The catalogue's main segments must have the algorithm `TRUTH`.
        """
        self._catalogue, self._share, self._report = catalogue, share, report
        self._random = random.Random(seed)
        self._busy = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")

    def wants(self) -> bool:
        """Whether to offer the next answer: at random, never during an audit."""
        return self._share > 0 and self._random.random() < self._share and not self._busy.locked()

    def offer(self, answered: Answered) -> None:
        """Audit an answer in the background, unless one is running."""
        if self._busy.acquire(blocking=False):
            self._thread.submit(self._examine, answered)

    def close(self) -> None:
        """Finish the running audit."""
        self._thread.shutdown(wait=True)

    def _examine(self, answered: Answered) -> None:
        try:
            finding = examine(self._catalogue, answered)
            self._report(finding)
            if finding.held is False:
                log.error(
                    "certificate_broken",
                    algorithm=finding.algorithm,
                    stage=finding.stage.value,
                    promised=finding.promised,
                    true=finding.true,
                )
        except Exception:
            log.exception("audit_failed", algorithm=answered.algorithm)
        finally:
            self._busy.release()
