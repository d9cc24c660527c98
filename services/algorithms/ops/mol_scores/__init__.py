"""Score every item for every query with a Mixture of Logits, in similarity units s = tau * phi.

An index uses a `MolScorer`, which prepares the items once. `reference.py` is the tests' plain formula.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

from services.algorithms.ops.mol_scores.scorer import FloatMatrix, MolScorer
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates

__all__ = ["MolScorer", "mol_scores"]


def mol_scores(queries: QueryStates, items: ItemStates, pair_gate: PairGate | None) -> FloatMatrix:
    """Score every item for every query.

    Shapes: queries (B, P_q, d) and (B, P), items (X, P_x, d) and (X, P) -> (B, X) float32, s in [-1, 1] for
    normalised components; pair p = p_q * P_x + p_x.
    Memory: besides the result one tile of a few dozen items per thread; (B, X, P) never exists.
    Raises: ValueError if widths or pair counts differ, or if more than one pair has no gate.
    Source: arXiv:2407.15462, equation 2 and appendix A.3 (GLU-SiLU gate); the gate reads cosines instead of logits.
    Cost:   B X P (d + 2 G) multiply-adds and B X (G + 2 P) exponentials.
    """
    return MolScorer(items, pair_gate).scores(queries)
