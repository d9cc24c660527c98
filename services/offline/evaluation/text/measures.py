"""Recall, Hits and MRR of ranked answers, per question, so that seeds and questions can be averaged apart.

It knows rows and ranks alone.

Letters: B questions, K results.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CUTS = (1, 5, 10, 20, 100)
MOST = max(CUTS)
_MRR_CUT = 10
NAMES = (*(f"recall@{cut}" for cut in CUTS), *(f"hits@{cut}" for cut in CUTS), f"mrr@{_MRR_CUT}")

PerQuestion = dict[str, npt.NDArray[np.float64]]


def measures(answers: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> PerQuestion:
    """Each question's values (B,) by name. Recall@K: share of its documents among the first K; Hits@K: 1 if any is;
    MRR@10: 1 over the first one's place, 0 behind the tenth.

    Raises: ValueError if the counts differ, a question wants nothing, or an answer names a document twice.
    """
    if len(answers) != len(wanted):
        raise ValueError(f"answers has {len(answers)} entries; allowed: {len(wanted)}, one per question")
    found = {name: np.zeros(len(wanted)) for name in NAMES}
    for row, (answer, documents) in enumerate(zip(answers, wanted, strict=True)):
        if not len(documents):
            raise ValueError(f"wanted[{row}] is empty; allowed: at least one document")
        ranked = [int(place) for place in answer[:MOST]]
        if len(set(ranked)) != len(ranked):
            raise ValueError(f"answers[{row}] names a document twice; allowed: each once")
        right = set(documents)
        places = np.array([place for place, one in enumerate(ranked) if one in right], dtype=np.int64)
        for cut in CUTS:
            inside = int((places < cut).sum())
            found[f"recall@{cut}"][row] = inside / len(right)
            found[f"hits@{cut}"][row] = float(inside > 0)
        if len(places) and places[0] < _MRR_CUT:
            found[f"mrr@{_MRR_CUT}"][row] = 1.0 / (1 + places[0])
    return found
