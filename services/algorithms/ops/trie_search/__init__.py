"""A trie's best identifiers when their tokens may take the positions in any order.

The search goes level by level, with an exact score and bound per node, in one native call (`cpu.cpp`).

Letters: s positions, U tokens scored, I identifiers, K results.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels
from services.algorithms.ops.trie_search.arrays import Ints, ItemRows, TrieArrays, laid_end_to_end

__all__ = [
    "MAX_POSITIONS",
    "Ints",
    "ItemRows",
    "TrieArrays",
    "TrieMatches",
    "laid_end_to_end",
    "search_trie",
]

MAX_POSITIONS = 12  # a node of depth n has a score per set of n used positions: at most C(12, 6) = 924


class TrieMatches(NamedTuple):
    """Matches, best first: identifiers (n,) int32, gains (n,) float32, n at most K.

    No omitted identifier gains more than `bound`, -inf if the beam dropped no node.
    """

    identifiers: Ints
    gains: npt.NDArray[np.float32]
    bound: float


_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Trie(ctypes.Structure):
    _fields_ = (
        ("num_root_words", _INT64),
        *((name, _POINTER) for name in ("tokens", "children", "ends", "identifiers", "root_bits", "root_ranks")),
    )


class _Question(ctypes.Structure):
    _fields_ = (
        *((name, _INT64) for name in ("num_tokens", "positions", "beams", "results", "in_order")),
        *((name, _POINTER) for name in ("tokens", "gains")),
        ("num_identifiers", _INT64),
        ("deleted", _POINTER),
        *((name, _INT64) for name in ("first_added", "num_added", "num_items")),
        *((name, _POINTER) for name in ("rows", "offsets", "added_rows", "added_offsets", "allowed")),
        *((name, _POINTER) for name in ("out_identifiers", "out_gains", "out_bound")),
    )


def search_trie(
    parts: tuple[TrieArrays, ...],
    deleted: npt.NDArray[np.bool_],
    tokens: Ints,
    gains: npt.NDArray[np.float32],
    *,
    beams: int,
    results: int,
    in_order: bool = False,
    items: ItemRows | None = None,
    allowed: npt.NDArray[np.bool_] | None = None,
    kernels: ctypes.CDLL | None = None,
) -> TrieMatches:
    """The best identifiers of several tries together, best first, ties by identifier.

    Shapes: deleted (I,); tokens (U,), ascending, and their gains (U, s) at each position, C-contiguous; allowed (X,)
    over the item rows; a result has an allowed item. beams: nodes kept per level and part. results: K. in_order: token
    i may only take position i. kernels: another library than this processor's.
    Raises: ValueError for gains of another shape, beams or results below 1.
    Cost:   per level and part, s C(s, level) operations for each of at most `beams` nodes, and s for each child.
    """
    if len(gains) != len(tokens) or not 1 <= gains.shape[1] <= MAX_POSITIONS:
        raise ValueError(f"gains have shape {gains.shape}; allowed: ({len(tokens)}, 1 to {MAX_POSITIONS})")
    for name, value in (("beams", beams), ("results", results)):
        if value < 1:
            raise ValueError(f"{name}={value} allowed: at least 1")
    tries = (_Trie * len(parts))(
        *(
            _Trie(
                len(part.root_bits),
                *(address(array) for array in (part.tokens, part.children, part.ends, part.identifiers)),
                address(part.root_bits),
                address(part.root_ranks),
            )
            for part in parts
        )
    )
    results = min(results, sum(len(part.identifiers) for part in parts))
    identifiers = np.empty(results, dtype=np.int32)
    found = np.empty(results, dtype=np.float32)
    bound = np.empty(1, dtype=np.float32)
    if results == 0:
        return TrieMatches(identifiers, found, -np.inf)
    filtered = None if allowed is None or items is None else np.ascontiguousarray(allowed)
    ask = _Question(
        *gains.shape,
        beams,
        results,
        in_order,
        *map(address, (tokens, gains)),
        len(deleted),
        address(deleted),
        0 if items is None else len(items.offsets) - 1,
        0 if items is None else len(items.added_offsets) - 1,
        0 if filtered is None else len(filtered),
        *(
            address(None if items is None else getattr(items, name))
            for name in ("rows", "offsets", "added_rows", "added_offsets")
        ),
        address(filtered),
        *map(address, (identifiers, found, bound)),
    )
    function = (kernels or load_kernels("trie_search")).freshet_search_trie
    function.restype = _INT64
    count = function(tries, _INT64(len(parts)), ctypes.byref(ask))
    return TrieMatches(identifiers[:count], found[:count], float(bound[0]))
