"""The trie search in NumPy: what `cpu.cpp` is compared with, bit for bit.

A node at depth n keeps, for each set of n positions, the best that its tokens gain there in any order: so an
identifier's gain is its best assignment, not an approximation of it. With M_t = max(0, the largest gain at t), an
upper bound on whatever lies below a node is the best over its sets of that gain plus M_t at the positions not used.
Both follow for a child from s numbers of its parent. Only which nodes are kept is a choice: the `beams` of a level
with the largest bounds. Knows only arrays.

Letters: s positions, U tokens scored, F nodes kept (frontier), C children, K results.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.trie_search import ItemRows, TrieArrays, TrieMatches

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# Bounds and gains are sums of at most 12 terms in different orders: what rounding may part.
_SLACK = np.float32(2e-6)


@dataclass(frozen=True, slots=True)
class _Children:
    """Of all nodes kept: which part and node each is, its parent's number, its token's row in U."""

    parts: Rows
    nodes: Rows
    parents: Rows
    tokens: Rows


class _Best:
    """The best identifiers so far."""

    def __init__(self, results: int) -> None:
        self.results = results
        self.identifiers = np.zeros(0, dtype=np.int32)
        self.gains = np.zeros(0, dtype=np.float32)

    @property
    def worst(self) -> np.float32:
        """What a further identifier must reach."""
        return self.gains[-1] if len(self.gains) == self.results else np.float32(-np.inf)

    def add(self, identifiers: npt.NDArray[np.int32], gains: Floats) -> None:
        identifiers = np.concatenate([self.identifiers, identifiers])
        gains = np.concatenate([self.gains, gains])
        order = np.lexsort((identifiers, -gains))[: self.results]
        self.identifiers, self.gains = identifiers[order], gains[order]


def search_in_numpy(
    parts: tuple[TrieArrays, ...],
    deleted: npt.NDArray[np.bool_],
    tokens: npt.NDArray[np.int32],
    gains: Floats,
    *,
    beams: int,
    results: int,
    in_order: bool = False,
    items: ItemRows | None = None,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> TrieMatches:
    """As `search_trie` says."""
    positions = gains.shape[1]
    largest = np.maximum(gains.max(axis=0, initial=0), 0).astype(np.float32)
    rest = _rest(largest)
    slack = _SLACK * np.float32(1.0 + positions * float(np.abs(gains).max(initial=0)))
    best = _Best(results)
    bound = np.float32(-np.inf)
    kept_parts = np.arange(len(parts))
    kept_nodes = np.zeros(len(parts), dtype=np.int64)
    table = np.zeros((len(parts), 1), dtype=np.float32)
    for level in range(positions):
        masks = _masks(positions, level, in_order)
        reach, gain = _free(table, masks, rest, positions, level, in_order)
        children = _children(parts, kept_parts, kept_nodes, tokens)
        if not len(children.nodes):
            break
        ours = gains[children.tokens]
        values = (gain[children.parents] + ours).max(axis=1)
        bounds = ((reach - largest)[children.parents] + ours).max(axis=1)
        for part, arrays in enumerate(parts):
            here = (children.parts == part) & (values >= best.worst)
            identifiers, of_child = _identifiers(arrays, children.nodes[here])
            wanted = _wanted(identifiers, deleted, items, allowed)
            best.add(identifiers[wanted], values[here][of_child[wanted]])
        inner = np.zeros(len(bounds), dtype=bool)
        for part, arrays in enumerate(parts):
            here = children.parts == part
            nodes = children.nodes[here]
            inner[here] = arrays.children[nodes] < arrays.children[nodes + 1]
        chosen = np.flatnonzero(inner & (bounds >= best.worst - slack))
        kept = []
        # Every part keeps `beams` of its own: what was inserted a moment ago is not crowded out by the big trie.
        for part in range(len(parts)):
            ours_here = chosen[children.parts[chosen] == part]
            order = ours_here[np.lexsort((ours_here, -bounds[ours_here]))]
            bound = max(bound, bounds[order[beams:]].max(initial=-np.inf))
            kept.append(np.sort(order[:beams]))
        chosen = np.concatenate(kept)
        table = _grown(table[children.parents[chosen]], ours[chosen], masks, _masks(positions, level + 1, in_order))
        kept_parts, kept_nodes = children.parts[chosen], children.nodes[chosen]
        if not len(chosen):
            break
    return TrieMatches(best.identifiers, best.gains, float(bound))


def _masks(positions: int, used: int, in_order: bool) -> Rows:
    """The sets of `used` positions as bits, rising."""
    if in_order:
        return np.array([(1 << used) - 1])
    return np.array([mask for mask in range(1 << positions) if mask.bit_count() == used])


def _rest(largest: Floats) -> Floats:
    """By set of used positions, what the others add at most: (2^s,), from the lowest unused one up."""
    positions = len(largest)
    rest = np.zeros(1 << positions, dtype=np.float32)
    for mask in range((1 << positions) - 2, -1, -1):
        lowest = (~mask & (mask + 1)).bit_length() - 1
        rest[mask] = rest[mask | 1 << lowest] + largest[lowest]
    return rest


def _free(
    table: Floats, masks: Rows, rest: Floats, positions: int, level: int, in_order: bool
) -> tuple[Floats, Floats]:
    """Per node and position t, over the sets without t: the best gain plus what remains, and the best gain."""
    reach = np.full((len(table), positions), -np.inf, dtype=np.float32)
    gain = reach.copy()
    with_rest = table + rest[masks]
    for position in [level] if in_order else range(positions):
        without = (masks >> position) & 1 == 0
        if without.any():
            reach[:, position] = with_rest[:, without].max(axis=1)
            gain[:, position] = table[:, without].max(axis=1)
    return reach, gain


def _grown(table: Floats, gains: Floats, masks: Rows, grown_masks: Rows) -> Floats:
    """The tables of children, from their parents' (C, sets) and their tokens' gains (C, s)."""
    number_of = {int(mask): number for number, mask in enumerate(masks)}
    grown = np.full((len(table), len(grown_masks)), -np.inf, dtype=np.float32)
    for number, mask in enumerate(grown_masks.tolist()):
        for position in range(gains.shape[1]):
            source = number_of.get(mask ^ (1 << position)) if mask >> position & 1 else None
            if source is not None:
                np.maximum(grown[:, number], table[:, source] + gains[:, position], out=grown[:, number])
    return grown


def _children(
    parts: tuple[TrieArrays, ...], kept_parts: Rows, kept_nodes: Rows, tokens: npt.NDArray[np.int32]
) -> _Children:
    """The children whose token was scored, in the order of the nodes kept, then by token."""
    found: list[tuple[Rows, Rows, Rows]] = []
    for part, arrays in enumerate(parts):
        parents = np.flatnonzero(kept_parts == part)
        begins, ends = arrays.children[kept_nodes[parents]], arrays.children[kept_nodes[parents] + 1]
        for parent, begin, end in zip(parents, begins, ends, strict=True) if len(parents) == 1 else ():
            # One node, the root: its children may be millions, so the tokens are looked up among them.
            there = np.searchsorted(arrays.tokens[begin:end], tokens)
            hit = np.flatnonzero(there < end - begin)
            hit = hit[arrays.tokens[begin + there[hit]] == tokens[hit]]
            found.append((begin + there[hit], np.full(len(hit), parent), hit))
        if len(parents) > 1:
            nodes, of = _ranges(begins, ends)
            there = np.searchsorted(tokens, arrays.tokens[nodes])
            hit = np.flatnonzero(there < len(tokens))
            hit = hit[tokens[there[hit]] == arrays.tokens[nodes[hit]]]
            found.append((nodes[hit], parents[of[hit]], there[hit]))
    nodes, parents, rows = (
        np.concatenate([each[i] for each in found]).astype(np.int64) if found else np.zeros(0, dtype=np.int64)
        for i in range(3)
    )
    return _Children(kept_parts[parents], nodes, parents, rows)


def _identifiers(arrays: TrieArrays, nodes: Rows) -> tuple[npt.NDArray[np.int32], Rows]:
    at, of = _ranges(arrays.ends[nodes], arrays.ends[nodes + 1])
    return arrays.identifiers[at], of


def _wanted(
    identifiers: npt.NDArray[np.int32],
    deleted: npt.NDArray[np.bool_],
    items: ItemRows | None,
    allowed: npt.NDArray[np.bool_] | None,
) -> Rows:
    wanted = np.flatnonzero(~deleted[identifiers])
    if items is None or allowed is None or not len(wanted):
        return wanted
    wanted = wanted[identifiers[wanted] < len(items.offsets) - 1 + len(items.added_offsets) - 1]  # as of these items
    number = identifiers[wanted].astype(np.int64)
    added = number >= len(items.offsets) - 1
    passes = np.zeros(len(wanted), dtype=bool)
    for which, rows, offsets, first in (
        (~added, items.rows, items.offsets, 0),
        (added, items.added_rows, items.added_offsets, len(items.offsets) - 1),
    ):
        at, of = _ranges(offsets[number[which] - first], offsets[number[which] - first + 1])
        of, here = of[rows[at] < len(allowed)], rows[at][rows[at] < len(allowed)]
        passes[which] = np.bincount(of, weights=allowed[here], minlength=int(which.sum())) > 0
    return wanted[passes]


def _ranges(begins: npt.NDArray[np.integer], ends: npt.NDArray[np.integer]) -> tuple[Rows, Rows]:
    """Every number of some ranges, and which range it is from."""
    counts = ends.astype(np.int64) - begins
    of = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(of)) - (np.cumsum(counts) - counts - begins)[of], of
