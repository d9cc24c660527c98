"""Audit a small share of live searches by brute force in the background.

An audit measures recall, whether the certificate or bound was right, and its slack. One audit runs at a time.
"""

import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import structlog

from services.algorithms.indexes.protocol import Scores
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.scoring.voted_answers import joined_answer, num_negative
from services.candidates.domain import SearchQuery, SearchResult, Stage

log = structlog.get_logger()

# Recall counts this many best items, or k if fewer.
RECALL_K = 100
# The audits' brute-force algorithm; requests cannot name it.
TRUTH = "truth"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One live answer. votes: for each item, None if nothing votes. model_share: as in `SearchAnswer`."""

    search: SearchQuery
    found: SearchResult
    votes: Mapping[str, float] | None = None
    model_share: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An audit's result. recall: the share of the true best `RECALL_K` (or k) in the answer. promised: the answer's
    bound on omitted items, None without proof. true: the highest omitted score, -inf if none was omitted.
    """

    algorithm: str
    stage: Stage
    recall: float
    promised: float | None
    true: float

    @property
    def held(self) -> bool | None:
        """Whether the bound was right; None without a bound."""
        return None if self.promised is None else self.true <= self.promised


def examine(catalogue: LiveCatalogue, answered: Answered) -> Finding:
    """Answer from the same version by brute force, and compare."""
    item_ids = answered.found.item_ids
    # One more than answered, so that the answer omits one.
    best_ids, best_scores = _truth(catalogue, answered, len(item_ids) + 1)
    there = frozenset(item_ids)
    is_there = np.array([item_id in there for item_id in best_ids], dtype=bool)
    wanted = min(RECALL_K, answered.search.k, len(best_ids))
    left_out = best_scores[~is_there]
    return Finding(
        algorithm=answered.found.algorithm,
        stage=answered.search.stage,
        recall=float(is_there[:wanted].mean()) if wanted else 1.0,
        promised=_promise(answered),
        true=float(left_out[0]) if len(left_out) else -math.inf,
    )


def _truth(catalogue: LiveCatalogue, answered: Answered, count: int) -> tuple[Sequence[str], Scores]:
    """Return the true best `count`: by final score for a FULL answer with votes, else by s."""
    search, served = answered.search, answered.found.served
    votes = answered.votes if search.stage is Stage.FULL else None
    more = 0 if votes is None else num_negative([votes])
    best = catalogue.index.search(search.query, count + more, search.filter, algorithm=TRUTH, version=served.version)
    ids, scores = best.item_ids[0], best.scores[0][: len(best.item_ids[0])]
    if votes is None:
        return ids, scores
    joined = joined_answer(
        catalogue,
        served,
        search.query,
        0,
        (ids, scores, best.certificates[0]),
        votes,
        k=count,
        wanted=search.filter,
        model_share=answered.model_share,
    )
    return joined.item_ids, joined.scores


def _promise(answered: Answered) -> float | None:
    search, found = answered.search, answered.found
    if search.stage is Stage.FIRST:
        return found.bound
    if found.certificate is None or found.certificate.gap is None:
        return None
    if len(found.scores) < search.k:
        return -math.inf  # a shorter proven answer: nothing else matches
    return found.scores[-1] + found.certificate.gap


class Audit:
    """Audits a share of the answers in a thread, which calls `report`. The catalogue has the algorithm `TRUTH`."""

    def __init__(
        self, catalogue: LiveCatalogue, *, share: float, report: Callable[[Finding], None], seed: int | None = None
    ) -> None:
        self._catalogue, self._share, self._report = catalogue, share, report
        self._random = random.Random(seed)
        self._busy = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")

    def wants(self) -> bool:
        """Return whether to offer the next answer: at random, but not during an audit."""
        return self._share > 0 and self._random.random() < self._share and not self._busy.locked()

    def offer(self, answered: Answered) -> None:
        """Audit an answer in the background, unless one is running."""
        if self._busy.acquire(blocking=False):
            self._thread.submit(self._examine, answered)

    def close(self) -> None:
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
            log.exception("audit_failed", algorithm=answered.found.algorithm)
        finally:
            self._busy.release()
