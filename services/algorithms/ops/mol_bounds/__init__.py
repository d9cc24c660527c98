"""Find the items that can reach a threshold under a Mixture of Logits, by one pass of certified bounds.

`BoundPass.survivors` drops only items whose s is provably below the threshold (proofs: decision 006). The bounds
require only that every gate is a softmax.
"""

from services.algorithms.ops.mol_bounds.items import AverageItems, BoundItems
from services.algorithms.ops.mol_bounds.survivors import BoundPass, Survivors, best_averages

__all__ = ["AverageItems", "BoundItems", "BoundPass", "Survivors", "best_averages"]
