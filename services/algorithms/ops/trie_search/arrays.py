"""A trie as four integer arrays, which can be mapped from a file.

Nodes are numbered level by level, so a node's children are a range, sorted by token. Ranges of successive nodes adjoin,
so one boundary per node suffices; the same holds for identifiers. A node takes 12 bytes, an identifier 4.

Letters: N nodes (the root included), I identifiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

_MAX_NODES = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrieArrays:
    """Node 0 is the root. Node i is reached by `tokens[i]`; its children are the nodes `children[i]` up to `children[i
    + 1]`, ascending by token; its identifiers are `identifiers[ends[i]:ends[i + 1]]`, ascending.

    Shapes: tokens (N,), children (N + 1,), ends (N + 1,), identifiers (I,), all int32, C-contiguous.
    """

    tokens: Ints
    children: Ints
    ends: Ints
    identifiers: Ints
    root_bits: npt.NDArray[np.uint64] = field(init=False)
    root_ranks: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent shapes or boundaries, because a walk would leave the arrays."""
        nodes, count = len(self.tokens), len(self.identifiers)
        for name, array, last in (("children", self.children, nodes), ("ends", self.ends, count)):
            if array.shape != (nodes + 1,):
                raise ValueError(f"{name} has shape {array.shape}; {nodes} nodes need ({nodes + 1},)")
            if nodes == 0 or array[0] != (1 if name == "children" else 0) or array[-1] != last:
                raise ValueError(f"{name} does not run from the first entry to the last, {last}")
            if (np.diff(array) < 0).any():
                raise ValueError(f"{name} decreases; boundaries must not decrease")
        if (self.children[:-1] <= np.arange(nodes)).any():
            raise ValueError("children lie at or before their node; a level follows its parents'")
        # The root may have a million children, so a bit per token marks them and a rank per word finds them.
        first = self.tokens[1 : self.children[1]]
        there = np.zeros(64 * (int(first.max(initial=-1)) // 64 + 1), dtype=bool)
        there[first] = True
        bits = np.packbits(there, bitorder="little").view(np.uint64)
        ranks = np.cumsum(np.bitwise_count(bits), dtype=np.int32) - np.bitwise_count(bits)
        object.__setattr__(self, "root_bits", bits)
        object.__setattr__(self, "root_ranks", ranks.astype(np.int32))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without the root's bits and ranks (3 bytes per 16 tokens of the vocabulary)."""
        return self.tokens.nbytes + self.children.nbytes + self.ends.nbytes + self.identifiers.nbytes

    @classmethod
    def build(cls, tokens: Ints, offsets: npt.NDArray[np.int64], identifiers: Ints) -> Self:
        """Build from I concatenated token sequences: sequence i is `tokens[offsets[i]:offsets[i + 1]]`. Sequences may
        be equal.

        Cost: a sort of I rows as long as the longest sequence; seconds for 5 million short ones.
        """
        lengths = np.diff(offsets)
        count, longest = len(lengths), int(lengths.max(initial=0))
        rows = np.full((longest, count), -1, dtype=np.int32)  # by level: sort keys are contiguous
        owner = np.repeat(np.arange(count), lengths)
        rows[np.arange(len(tokens)) - offsets[:-1][owner], owner] = tokens
        order = np.lexsort((identifiers, *rows[::-1]))
        rows, lengths, identifiers = rows[:, order], lengths[order], identifiers[order]
        fresh = np.zeros(count, dtype=bool)  # whether this row's path differs from the previous
        fresh[:1] = True
        node = np.zeros(count, dtype=np.int64)  # the path's last node
        ends_at = np.zeros(count, dtype=np.int64)
        level_tokens, parents, base = [np.zeros(1, dtype=np.int32)], [], 1
        for level in range(longest):
            here = lengths > level
            fresh[1:] |= rows[level, 1:] != rows[level, :-1]
            firsts = np.flatnonzero(fresh & here)
            parents.append(node[firsts])
            level_tokens.append(rows[level, firsts])
            # A finished row stays at its node. In `here`, a row with an unchanged path shares the previous row's node.
            node[here] = base - 1 + np.cumsum(fresh & here)[here]
            ends_at[here] = node[here]
            base += len(firsts)
            if base > _MAX_NODES:
                raise ValueError(f"nodes={base} allowed: up to {_MAX_NODES}")
        children = np.bincount(np.concatenate(parents), minlength=base) if parents else np.zeros(1, dtype=np.int64)
        at_nodes = np.argsort(ends_at, kind="stable")
        return cls(
            tokens=np.concatenate(level_tokens),
            children=_boundaries(children, 1),
            ends=_boundaries(np.bincount(ends_at, minlength=base), 0),
            identifiers=np.ascontiguousarray(identifiers[at_nodes], dtype=np.int32),
        )


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Items of identifiers: rows[offsets[i]:offsets[i + 1]] for identifier i of the I first ones, and
    added_rows[added_offsets[i - I]:...] for later ones. Shapes: offsets (I + 1,) int64, rows int32.
    """

    rows: Ints
    offsets: npt.NDArray[np.int64]
    added_rows: Ints
    added_offsets: npt.NDArray[np.int64]

    def of(self, identifier: int) -> Ints:
        number = identifier - (len(self.offsets) - 1)
        if number < 0:
            return self.rows[self.offsets[identifier] : self.offsets[identifier + 1]]
        return self.added_rows[self.added_offsets[number] : self.added_offsets[number + 1]]


def laid_end_to_end(sequences: Sequence[Sequence[int]]) -> tuple[Ints, npt.NDArray[np.int64]]:
    offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences)), out=offsets[1:])
    flat = (token for sequence in sequences for token in sequence)
    return np.fromiter(flat, dtype=np.int32, count=int(offsets[-1])), offsets


def _boundaries(counts: npt.NDArray[np.int64], first: int) -> Ints:
    boundaries = np.empty(len(counts) + 1, dtype=np.int32)
    boundaries[0] = first
    np.cumsum(counts, out=boundaries[1:])
    boundaries[1:] += first
    return boundaries
