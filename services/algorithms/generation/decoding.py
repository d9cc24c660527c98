"""Permutation decoding: the best identifiers when their phrases may come in any order.

An identifier has tokens d^1 ... d^n, n at most s. An injective map pi puts each token at one of the s positions. The
map's score is sum_i log P~_pi(i)(d^i), plus log P~_t([PAD]) at each position t without a token. The identifier's score
is the maximum over all maps (decision 017, not in arXiv:2209.05861). Mode "fixed", the training objective, puts token i
at position i.

Scores of found identifiers are exact. A beam limits the search; no other identifier scores above `bound`.

Letters: s positions, U tokens scored, K results.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.generation.trie import PADDING, IdentifierTrie
from services.algorithms.ops.trie_search import ItemRows, search_trie

Mode = Literal["permutation", "fixed"]
MODES: tuple[Mode, ...] = ("permutation", "fixed")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Best first, ties by identifier: identifiers (n,) int32, scores (n,) float64 natural logarithms, n at most K.

    No omitted identifier scores above `bound`; -inf means that none was omitted.
    """

    identifiers: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float64]
    bound: float
    results: int

    @property
    def exact(self) -> bool:
        """Whether the found identifiers are proven the best, except for float32 rounding."""
        return self.bound <= (self.scores[-1] if len(self.scores) == self.results else -np.inf)

    def __len__(self) -> int:
        return len(self.identifiers)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.identifiers.tolist(), self.scores.tolist(), strict=True))


def decode(
    scores: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
    trie: IdentifierTrie,
    *,
    beams: int,
    results: int,
    mode: Mode = "permutation",
    items: ItemRows | None = None,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Decoded:
    """The `results` best identifiers whose tokens are all among `tokens`.

    Shapes: scores (s, U) float32, tokens (U,), ascending, [PAD] first; allowed (X,) over the item rows. A result has at
    least one allowed item.
    Raises: ValueError if shapes differ, a score is not finite, or the trie has identifiers longer than s.
    Cost:   per position, the children of at most `beams` nodes.
    """
    if scores.ndim != 2 or scores.shape[1] != len(tokens):
        raise ValueError(f"scores have shape {scores.shape}; allowed: (s, {len(tokens)}), a column per token")
    if trie.max_tokens > scores.shape[0]:
        raise ValueError(f"identifiers have up to {trie.max_tokens} tokens; allowed: {scores.shape[0]}, the positions")
    if not len(tokens) or tokens[0] != PADDING or (np.diff(tokens) <= 0).any():
        raise ValueError(f"tokens begin with {tokens[:3].tolist()}; allowed: rising, {PADDING} ([PAD]) first")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} allowed: {', '.join(MODES)}")
    if allowed is not None and items is None:
        raise ValueError("allowed is given without items; allowed: both or neither")
    by_token = np.ascontiguousarray(scores.T, dtype=np.float32)
    padding = by_token[0]
    # Relative to padding, identifiers of any length are comparable.
    gains = by_token - padding
    if not np.isfinite(gains).all():
        raise ValueError("scores hold a value that is not finite")
    parts, deleted = trie.view()
    found = search_trie(
        parts,
        deleted,
        np.ascontiguousarray(tokens, dtype=np.int32),
        gains,
        beams=beams,
        results=results,
        in_order=mode == "fixed",
        items=items,
        allowed=allowed,
    )
    base = float(padding.sum(dtype=np.float64))
    return Decoded(found.identifiers, base + found.gains.astype(np.float64), base + found.bound, results)
