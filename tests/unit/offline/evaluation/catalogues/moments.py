"""What a scene of items and queries looks like: how alike its views are, how unequal its gates, how popular its best.

The generator's constants (`fitted.py`) were moved until generated scenes had a trained model's moments; tests hold them
there.

Letters: X items, B queries, P pairs, d width, G gate hidden width.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from services.offline.evaluation.catalogues.scene import Scene

_RESULTS = 100


def silu(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x sigmoid(x)."""
    return np.asarray(values / (1 + np.exp(-values)))


def pair_cosines(scene: Scene, query: int) -> npt.NDArray[np.float32]:
    """One query's cosines with every item: (X, P)."""
    cosines = np.einsum("qd,xpd->xqp", scene.queries.components[query], scene.items.components, optimize=True)
    return np.ascontiguousarray(cosines).reshape(len(scene.items), -1)


def pair_network(scene: Scene, cosines: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The pair network's output for cosines (n, P): (n, P)."""
    gate = scene.pair_gate
    if gate is None:
        return np.zeros_like(cosines)
    return np.asarray(silu(cosines @ gate.hidden_weight.T + gate.hidden_bias) @ gate.out_weight.T + gate.out_bias)


def measure(scene: Scene) -> Mapping[str, Any]:
    """Averages over queries, each over that query's items, unless said otherwise. Memory: a few (X, P) arrays.

    cosine_mean, cosine_sd: of c_p. pair_correlation: between two pairs' cosines. average_sd: of the mean cosine.
    popularity_share: share of the mean cosine's variance that is the same for all queries. score_mean, score_sd: of s.
    score_heights: (s - mean) / sd at ranks 1, 10, 100. average_correlation: of s with the mean cosine.
    spread: E over pi of |c_p - s|. entropy: of pi, over log P. largest_weight: max_p pi_p.
    average_recall: of the K best, those among the 200, 500, 1000 best by mean cosine.
    """
    rows: list[dict[str, Any]] = []
    averages = np.empty((len(scene.queries), len(scene.items)), dtype=np.float32)
    for query in range(len(scene.queries)):
        cosines = pair_cosines(scene, query)
        pairs = cosines.shape[1]
        gate = pair_network(scene, cosines)
        if scene.queries.gate is not None and scene.items.gate is not None:
            gate = gate + scene.queries.gate[query] * scene.items.gate
        weights = np.exp(silu(gate))
        weights /= weights.sum(axis=1, keepdims=True)
        scores = (weights * cosines).sum(axis=1)
        average = cosines.mean(axis=1)
        averages[query] = average
        order = np.argsort(-scores)
        by_average = np.empty(len(average), dtype=np.int64)
        by_average[np.argsort(-average)] = np.arange(len(average))
        # var of the mean = mean var * (1 + (P - 1) correlation) / P, which defines the correlation meant here.
        inflation = average.var() / cosines.var(axis=0).mean() * pairs
        entropy = -(weights * np.log(np.maximum(weights, 1e-30))).sum(axis=1).mean()
        rows.append(
            {
                "cosine_mean": cosines.mean(),
                "cosine_sd": np.sqrt(cosines.var(axis=0).mean()),
                "pair_correlation": (inflation - 1) / (pairs - 1),
                "average_sd": average.std(),
                "score_mean": scores.mean(),
                "score_sd": scores.std(),
                "score_heights": (scores[order[[0, 9, 99]]] - scores.mean()) / scores.std(),
                "average_correlation": np.corrcoef(scores, average)[0, 1],
                "spread": (weights * np.abs(cosines - scores[:, None])).sum(axis=1).mean(),
                "entropy": entropy / np.log(pairs),
                "largest_weight": weights.max(axis=1).mean(),
                "average_recall": [(by_average[order[:_RESULTS]] < size).mean() for size in (200, 500, 1000)],
            }
        )
    popularity = float(averages.mean(axis=0).var() / averages.var(axis=1).mean())
    means = {name: np.mean([row[name] for row in rows], axis=0) for name in rows[0]}
    return means | {"popularity_share": popularity}
