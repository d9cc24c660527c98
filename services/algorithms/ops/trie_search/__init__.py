"""The identifiers of a trie that score best when their tokens may take the positions in any order.

A level-by-level search with an exact score and an exact bound per node. `reference.py` says in NumPy what comes out;
`cpu.cpp` does the same in one native call. What tokens, identifiers and items are is not known here.

Letters: s positions, U tokens scored, I identifiers, K results.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.native import load_kernels
from services.algorithms.ops.trie_search.arrays import Ints, ItemRows, TrieArrays, laid_end_to_end
from services.algorithms.ops.trie_search.native import search_native
from services.algorithms.ops.trie_search.question import MAX_POSITIONS, Found, TrieQuestion
from services.algorithms.ops.trie_search.reference import search_reference

__all__ = [
    "MAX_POSITIONS",
    "Backend",
    "Found",
    "Ints",
    "ItemRows",
    "TrieArrays",
    "TrieQuestion",
    "laid_end_to_end",
    "search_trie",
]

Backend = Literal["auto", "numpy"]


def search_trie(
    parts: tuple[TrieArrays, ...],
    deleted: npt.NDArray[np.bool_],
    question: TrieQuestion,
    *,
    items: ItemRows | None = None,
    allowed: npt.NDArray[np.bool_] | None = None,
    backend: Backend = "auto",
) -> Found:
    """The best identifiers of several tries together, best first, ties by identifier.

    Shapes: deleted (I,), allowed (X,) over the rows of `items`: an identifier needs one allowed item.
    Cost:   per level, s operations for each child of the at most `beams` nodes that a part keeps, s C(s, level) for
            those themselves.
    """
    library = load_kernels("trie_search") if backend == "auto" else None
    if library is None:
        return search_reference(parts, deleted, question, items, allowed)
    return search_native(library, parts, deleted, question, items, allowed)
