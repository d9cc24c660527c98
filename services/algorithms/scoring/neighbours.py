"""Item neighbours: items close to each other in users' histories vote for a user's next item.

`voted_answers.py` merges their votes with the model and preserves certificates. Each request computes the votes from
the user's last items, so a click counts at once.

Letters: X items, N neighbours of an item, n voted items.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import NeighbourShape
from services.algorithms.scoring.states import FloatArray

Rows = npt.NDArray[np.int64]

# At decay 0.7 the 31st newest item weighs 2e-5.
WINDOW = 30
# The strongest votes have the same HR@200 as all votes (1,200 on average) on ml-latest-small and Amazon Beauty.
MAX_VOTED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemNeighbours:
    """Each item's N neighbours, items (X, N) int32, with weights (X, N); weight 0 pads."""

    shape: NeighbourShape
    items: npt.NDArray[np.int32]
    weights: FloatArray

    def __post_init__(self) -> None:
        wanted = (len(self.items), self.shape.num_neighbours)
        for name, array in (("items", self.items), ("weights", self.weights)):
            if array.shape != wanted:
                raise ValueError(f"neighbours.{name} has shape {array.shape}; allowed: {wanted}")
        if self.items.size and not 0 <= int(self.items.min()) <= int(self.items.max()) < len(self.items):
            raise ValueError(
                f"neighbours.items from {self.items.min()} to {self.items.max()}; allowed: 0 to {len(self.items) - 1}"
            )
        if not (np.isfinite(self.weights).all() and (self.weights >= 0).all()):
            raise ValueError("neighbours.weights holds negative, NaN or infinite values; allowed: finite, 0 and more")

    @property
    def nbytes(self) -> int:
        return int(self.items.nbytes + self.weights.nbytes)

    def votes(self, recent: Sequence[int] | Rows, left_out: Sequence[int] | Rows) -> tuple[Rows, FloatArray]:
        """A user's votes: rows (n,) and votes (n,) in (0, 1], best first, at most MAX_VOTED.

        recent: distinct rows, newest first; the first WINDOW are used. The item at index r gives its neighbours decay^r
        times their weights; sums are divided by the largest. `left_out` rows get no vote. Cost: WINDOW * N weights,
        sorted.
        """
        recent = np.asarray(recent[:WINDOW], dtype=np.int64)
        rows, places = np.unique(self.items[recent], return_inverse=True)
        weights = self.weights[recent] * self.shape.decay ** np.arange(len(recent))[:, None]
        sums = np.bincount(places.ravel(), weights=weights.ravel(), minlength=len(rows))
        sums[np.isin(rows, np.asarray(left_out, dtype=np.int64))] = 0
        best = np.lexsort((rows, -sums))[:MAX_VOTED]
        best = best[sums[best] > 0]
        return rows[best].astype(np.int64), (sums[best] / sums[best[:1]]).astype(np.float64)
