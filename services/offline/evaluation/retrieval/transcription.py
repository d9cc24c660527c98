"""A PyTorch transcription of the paper's formulas: the baseline of every run.

It implements sections 2 and 3.2 of arXiv:2407.15462 as the authors' code does: batched tensor operations, torch.topk,
precomputed values of items, and chunks only if intermediates would not fit.

Letters: B queries, X items, P_q, P_x components, P = P_q * P_x, d width, G gate hidden width, K results, N pool size.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate, QueryStates

# Maximum number of floats in one intermediate (b, x, max(P, G)). It was measured with P_q = P_x = 8, d = 32 and 100,000
# items on two cores. With B = 32, 2^22 took 12.0 s, and 2^23 to 2^26 took 17.3 to 23.3 s. With B = 1, 2^20 was a fifth
# faster than 2^22.
_CHUNK_FLOATS = 1 << 22


class Transcription:
    """The paper's four algorithms over a catalogue of tensors; answers are item rows (B, K), best first."""

    def __init__(self, items: ItemStates, pair_gate: PairGate | None, *, chunk_floats: int = _CHUNK_FLOATS) -> None:
        """Raises: ValueError without a pair gate, because the paper's gate always has one."""
        if pair_gate is None:
            raise ValueError("pair_gate=None; the transcription needs the pair gate")
        self._components = _tensor(items.components)
        self._gate = None if items.gate is None else _tensor(items.gate)
        self._w1, self._b1 = _tensor(pair_gate.hidden_weight), _tensor(pair_gate.hidden_bias)
        self._w2, self._b2 = _tensor(pair_gate.out_weight), _tensor(pair_gate.out_bias)
        self._means = self._components.mean(dim=1)  # in advance, as the paper's line 12 allows
        self._chunk_floats = chunk_floats

    @torch.inference_mode()
    def scores(self, queries: QueryStates) -> Tensor:
        """Return s of every pair, (B, X)."""
        components, gate = _tensors(queries)
        num_items = len(self._components)
        widest = max(len(self._w1), len(self._w2))
        step = max(1, self._chunk_floats // (len(components) * widest))
        parts = []
        for x in range(0, num_items, step):
            item_gate = None if self._gate is None else self._gate[x : x + step]
            cosines = torch.einsum("bqd,xpd->bxqp", components, self._components[x : x + step]).flatten(2)
            parts.append(self._mixture(cosines, gate, item_gate))
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def brute_force(self, queries: QueryStates, k: int) -> Tensor:
        """Score everything, take the best."""
        return self.scores(queries).topk(k, dim=1).indices

    @torch.inference_mode()
    def top_k_per_embedding(self, queries: QueryStates, k: int, *, pool_size: int) -> Tensor:
        """For every pair of a query and an item component, take the N best items by dot product; then take the best of
        their union.
        """
        return self._best_of(queries, k, self._per_embedding(queries, pool_size))

    @torch.inference_mode()
    def top_k_avg(self, queries: QueryStates, k: int, *, pool_size: int) -> Tensor:
        """Take the N best by the averaged components (equation 6), then the best of them."""
        return self._best_of(queries, k, self._average(queries, pool_size), distinct=True)

    @torch.inference_mode()
    def combined_top_k(self, queries: QueryStates, k: int, *, pair_pool_size: int, average_pool_size: int) -> Tensor:
        """Take the best of both pools' union."""
        pools = [self._per_embedding(queries, pair_pool_size), self._average(queries, average_pool_size)]
        return self._best_of(queries, k, torch.cat(pools, dim=1))

    def _per_embedding(self, queries: QueryStates, size: int) -> Tensor:
        """Return rows of the N best of each pair, with repetitions: (B, P N)."""
        components, _ = _tensors(queries)
        size = min(size, len(self._components))
        pools = []
        for p_x in range(self._components.shape[1]):
            items = self._components[:, p_x]
            for p_q in range(components.shape[1]):
                pools.append((components[:, p_q] @ items.T).topk(size, dim=1, sorted=False).indices)
        return torch.cat(pools, dim=1)

    def _average(self, queries: QueryStates, size: int) -> Tensor:
        components, _ = _tensors(queries)
        size = min(size, len(self._means))
        return (components.sum(dim=1) @ self._means.T).topk(size, dim=1, sorted=False).indices

    def _best_of(self, queries: QueryStates, k: int, pools: Tensor, *, distinct: bool = False) -> Tensor:
        """Return the best of each query's pool (B, n) by s; repetitions count once."""
        components, gate = _tensors(queries)
        if not distinct:
            pools = pools.sort(dim=1).values
        widest = max(len(self._w1), len(self._w2))
        step = max(1, self._chunk_floats // (pools.shape[1] * widest))
        parts = []
        for b in range(0, len(pools), step):
            rows = pools[b : b + step]
            item_gate = None if self._gate is None else self._gate[rows]
            cosines = torch.einsum("bqd,bnpd->bnqp", components[b : b + step], self._components[rows]).flatten(2)
            parts.append(self._mixture(cosines, None if gate is None else gate[b : b + step], item_gate))
        scores = torch.cat(parts)
        if not distinct:
            scores[:, 1:].masked_fill_(pools[:, 1:] == pools[:, :-1], -torch.inf)
        return pools.gather(1, scores.topk(min(k, scores.shape[1]), dim=1).indices)

    def _mixture(self, cosines: Tensor, query_gate: Tensor | None, item_gate: Tensor | None) -> Tensor:
        """Return s (b, x) for cosines (b, x, P), query_gate (b, P) and item_gate (x, P) or (b, x, P)."""
        gate = silu(cosines @ self._w1.T + self._b1) @ self._w2.T + self._b2
        if query_gate is not None and item_gate is not None:
            gate = gate + query_gate[:, None, :] * item_gate
        return (torch.softmax(silu(gate), dim=-1) * cosines).sum(dim=-1)


def _tensors(queries: QueryStates) -> tuple[Tensor, Tensor | None]:
    return _tensor(queries.components), None if queries.gate is None else _tensor(queries.gate)


def _tensor(array: FloatArray) -> Tensor:
    """PyTorch needs writable memory: a read-only array (of a memory-mapped bundle) is copied."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
