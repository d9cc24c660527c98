"""Cut sequences of symbols into the fewest known pieces, many sequences at once.

Matching finds the pieces at each position. It walks a trie's sorted edges, one level at a time for all positions.
Dynamic programming then runs over the stretches between positions that no piece crosses, all in parallel.

Letters: N symbols of all sequences, L longest piece, V pieces.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Matches = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceTrie:
    """A trie. Each level has sorted edges (parent node, symbol) and, per edge, the piece that ends there, -1 if
    none.
    """

    edges: tuple[Integers, ...]
    pieces: tuple[npt.NDArray[np.int32], ...]
    num_symbols: int

    @classmethod
    def build(cls, symbols: Integers, starts: Integers, pieces: npt.NDArray[np.int32], num_symbols: int) -> "PieceTrie":
        """Build from V flat sequences: sequence v is symbols[starts[v]:starts[v + 1]], and `pieces[v]` its number.

        Symbols are below `num_symbols`; sequences are distinct and not empty.
        """
        lengths = np.diff(starts)
        first = starts[:-1]
        nodes = np.zeros(len(lengths), dtype=np.int64)
        here = np.arange(len(lengths))
        edges, ends = [], []
        level = 0
        while len(here):
            keys = nodes * num_symbols + symbols[first[here] + level]
            known, nodes = np.unique(keys, return_inverse=True)
            end = np.full(len(known), -1, dtype=np.int32)
            done = lengths[here] == level + 1
            end[nodes[done]] = pieces[here[done]]
            edges.append(known)
            ends.append(end)
            here, nodes = here[~done], nodes[~done]
            level += 1
        return cls(edges=tuple(edges), pieces=tuple(ends), num_symbols=num_symbols)

    def matches(self, symbols: Integers, starts: Integers) -> Matches:
        """The pieces at each position, (N, L) int32: column n - 1 has the piece of n symbols, -1 if none.

        A symbol outside 0 … num_symbols - 1 matches nothing.
        """
        found = np.full((len(symbols), max(1, len(self.edges))), -1, dtype=np.int32)
        room = np.repeat(starts[1:], np.diff(starts)) - np.arange(len(symbols))
        positions = np.arange(len(symbols))
        nodes = np.zeros(len(symbols), dtype=np.int64)
        for level, (edges, pieces) in enumerate(zip(self.edges, self.pieces, strict=True)):
            fits = room[positions] > level
            positions, nodes = positions[fits], nodes[fits]
            symbol = symbols[positions + level]
            known = (symbol >= 0) & (symbol < self.num_symbols)
            positions, nodes, symbol = positions[known], nodes[known], symbol[known]
            keys = nodes * self.num_symbols + symbol
            below = np.minimum(np.searchsorted(edges, keys), len(edges) - 1)
            there = edges[below] == keys
            positions, nodes = positions[there], below[there]
            found[positions, level] = pieces[nodes]
        return found


def fewest(matches: Matches, unit_costs: Integers, unit_gains: Integers, counts: Integers) -> npt.NDArray[np.int32]:
    """Cut every sequence at the least cost. Return the length of the step from each position (N,) int32, 0 for none.

    A step over one symbol costs `unit_costs` (N,) and gains `unit_gains` (N,). A longer step needs a piece in `matches`
    (N, L) within its sequence, costs 1 and gains the piece's count. Ties go to the larger gain, then the longer step.
    """
    size, longest = matches.shape
    take = np.zeros(size, dtype=np.int32)
    begins, ends = _stretches(matches)
    lengths = ends - begins
    single = lengths == 1
    take[begins[single]] = 1
    order = np.argsort(-lengths[~single], kind="stable")
    begins, ends, lengths = begins[~single][order], ends[~single][order], lengths[~single][order]
    if not len(begins):
        return take
    cost, gain = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    step = np.ones(size, dtype=np.int32)
    negative = -lengths
    for back in range(int(lengths[0])):
        active = int(np.searchsorted(negative, -back, side="left"))  # stretches longer than `back`
        positions = ends[:active] - 1 - back
        best_cost, best_gain = unit_costs[positions], unit_gains[positions]
        best_step = np.ones(active, dtype=np.int32)
        if back:
            best_cost = best_cost + cost[positions + 1]
            best_gain = best_gain + gain[positions + 1]
        for taken in range(2, min(longest, back + 1) + 1):
            piece = matches[positions, taken - 1]
            there = np.flatnonzero(piece >= 0)
            if not len(there):
                continue
            own_cost = np.ones(len(there), dtype=np.int64)
            own_gain = counts[piece[there]]
            if taken <= back:
                behind = positions[there] + taken
                own_cost += cost[behind]
                own_gain = own_gain + gain[behind]
            better = (own_cost < best_cost[there]) | ((own_cost == best_cost[there]) & (own_gain >= best_gain[there]))
            there, own_cost, own_gain = there[better], own_cost[better], own_gain[better]
            best_cost[there], best_gain[there], best_step[there] = own_cost, own_gain, taken
        cost[positions], gain[positions], step[positions] = best_cost, best_gain, best_step
    cursor = begins
    while len(cursor):
        take[cursor] = step[cursor]
        cursor = cursor + step[cursor]
        going = cursor < ends
        cursor, ends = cursor[going], ends[going]
    return take


def _stretches(matches: Matches) -> tuple[Integers, Integers]:
    """Begin and end of each stretch. No piece crosses a stretch's ends."""
    size, longest = matches.shape
    reach = np.arange(1, size + 1)
    for taken in range(2, longest + 1):
        there = np.flatnonzero(matches[:, taken - 1] >= 0)
        reach[there] = there + taken
    reach = np.maximum.accumulate(reach)
    begin = np.ones(size, dtype=bool)
    begin[1:] = reach[:-1] <= np.arange(1, size)
    begins = np.flatnonzero(begin)
    return begins, np.append(begins[1:], size)
