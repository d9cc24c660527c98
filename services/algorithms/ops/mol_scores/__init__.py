"""Score items with a Mixture of Logits, in similarity units s = tau * phi (arXiv:2407.15462, equation 2, appendix A.3).

`MolScorer` prepares the items once. Tests compare with the plain formula in `reference.py`. Besides its result, a call
stores one tile of a few dozen items per thread, never (B, X, P). Cost: B X P (d + 2 G) multiply-adds and B X (G + 2 P)
exponentials.

Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x, d component width, G gate hidden width.
"""

from services.algorithms.ops.mol_scores.scorer import MolScorer

__all__ = ["MolScorer"]
