"""The compiled search of `cpu.cpp`: its arguments as C structures, and the call.

Knows memory layouts only; `reference.py` says what the numbers mean.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address
from services.algorithms.ops.trie_search.arrays import ItemRows, TrieArrays
from services.algorithms.ops.trie_search.question import Found, TrieQuestion

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


def search_native(
    library: ctypes.CDLL,
    parts: tuple[TrieArrays, ...],
    deleted: npt.NDArray[np.bool_],
    question: TrieQuestion,
    items: ItemRows | None,
    allowed: npt.NDArray[np.bool_] | None,
) -> Found:
    """As `search_trie` says."""
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
    results = min(question.results, sum(len(part.identifiers) for part in parts))
    identifiers = np.empty(results, dtype=np.int32)
    gains = np.empty(results, dtype=np.float32)
    bound = np.empty(1, dtype=np.float32)
    if results == 0:
        return Found(identifiers, gains, -np.inf)
    filtered = None if allowed is None or items is None else np.ascontiguousarray(allowed)
    ask = _Question(
        *question.gains.shape,
        question.beams,
        results,
        question.in_order,
        *map(address, (question.tokens, question.gains)),
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
        *map(address, (identifiers, gains, bound)),
    )
    function = library.freshet_search_trie
    function.restype = _INT64
    count = function(tries, _INT64(len(parts)), ctypes.byref(ask))
    return Found(identifiers[:count], gains[:count], float(bound[0]))
