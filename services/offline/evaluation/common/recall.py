"""Recall of answers against exact ones, per query, in any order."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any] | Sequence[Sequence[Hashable]]


def recall(found: Rows, exact: Rows) -> float:
    """Mean over queries of the share of exact answers that were found; -1 fills a row and is no answer.

    Shapes: found (B, any), exact (B, any); rows may differ in length. A query without exact answers counts as 0.
    Raises: ValueError if B differs.
    """
    shares = []
    for answers, truth in zip(found, exact, strict=True):
        wanted = set(np.asarray(truth).tolist()) - {-1}
        shares.append(len(wanted.intersection(np.asarray(answers).tolist())) / max(1, len(wanted)))
    return float(np.mean(shares))
