"""The training loss over negatives: public function `mol_sampled_softmax`, checked against `reference.py` in tests."""

from services.offline.training.mol_sampled_softmax.fused import mol_sampled_softmax
from services.offline.training.mol_sampled_softmax.types import GateWeights, Negatives, States

__all__ = ["GateWeights", "Negatives", "States", "mol_sampled_softmax"]
