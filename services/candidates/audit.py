"""The process measures itself: a small share of live searches is answered again by brute force, in the background.

It compares what was answered with the truth: recall, whether the certificate or bound held, and how far the promise
was from what was true. One audit runs at a time, beside the searches; those that come meanwhile are not sampled.
"""

import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from services.algorithms.indexes.protocol import Certificate, Index, Mask
from services.algorithms.states import QueryStates
from services.candidates.domain import Stage

log = structlog.get_logger()

# Recall is of this many best items, or of k where fewer were asked for.
RECALL_K = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One live answer: item rows (n,) best first with their scores, and what was promised of the rest."""

    algorithm: str
    stage: Stage
    query: QueryStates
    k: int
    allowed: Mask | None
    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    bound: float | None
    certificate: Certificate | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What an audit found.

    recall: share of the true best `RECALL_K` (or k) among the answered. promised: the best left-out score that the
    answer allowed for, None without proof. true: the best score that was left out, -inf when nothing was.
    """

    algorithm: str
    stage: Stage
    recall: float
    promised: float | None
    true: float

    @property
    def held(self) -> bool | None:
        """Whether the promise was kept; None where none was made."""
        return None if self.promised is None else self.true <= self.promised


def examine(truth: Index, answered: Answered) -> Finding:
    """Answer again by `truth`, an exact index over the same items, and compare."""
    # Among one more item than was answered, one was left out.
    best = truth.search(answered.query, len(answered.rows) + 1, answered.allowed)
    exact_rows, exact_scores = best.item_indices[0], best.scores[0]
    exact_scores, exact_rows = exact_scores[exact_rows >= 0], exact_rows[exact_rows >= 0]
    found = np.isin(exact_rows, answered.rows)
    wanted = min(RECALL_K, answered.k, len(exact_rows))
    left_out = exact_scores[~found]
    return Finding(
        algorithm=answered.algorithm,
        stage=answered.stage,
        recall=float(found[:wanted].mean()) if wanted else 1.0,
        promised=_promise(answered),
        true=float(left_out[0]) if len(left_out) else -math.inf,
    )


def _promise(answered: Answered) -> float | None:
    if answered.stage is Stage.FIRST:
        return answered.bound
    certificate = answered.certificate
    if certificate is None or certificate.gap is None:
        return None
    if len(answered.scores) < answered.k:
        return -math.inf  # a shorter proven answer says that there is nothing else
    return float(answered.scores[-1]) + certificate.gap


class Audit:
    """Samples answers and examines them in a thread of its own."""

    def __init__(
        self, truth: Index, *, share: float, report: Callable[[Finding], None], seed: int | None = None
    ) -> None:
        """`share` of the answers is sampled; `report` is called from the audit's thread."""
        self._truth, self._share, self._report = truth, share, report
        self._random = random.Random(seed)
        self._busy = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")

    def wants(self) -> bool:
        """Whether the next answer should be offered; decided by chance, and never while an audit runs."""
        return self._share > 0 and self._random.random() < self._share and not self._busy.locked()

    def offer(self, answered: Answered) -> None:
        """Examine an answer in the background, unless another one is being examined."""
        if self._busy.acquire(blocking=False):
            self._thread.submit(self._examine, answered)

    def close(self) -> None:
        """Finish the audit that runs."""
        self._thread.shutdown(wait=True)

    def _examine(self, answered: Answered) -> None:
        try:
            finding = examine(self._truth, answered)
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
