"""The common part of every index: prepared items, and the checks of a request.

Letters: B queries, X items.
"""

from collections.abc import Mapping

import numpy as np

from services.algorithms.indexes.cpu_passes import CpuPasses
from services.algorithms.indexes.passes import Passes
from services.algorithms.indexes.protocol import Indices, Mask, check_request
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.quantized_scan import RowCodes
from services.algorithms.scoring.states import QueryStates


class ScoredIndex:
    """An index of X items in order of their ids. `passes` has items and scorer."""

    passes: Passes
    scorer: MolScorer

    def __init__(self, items: MolScorer | Passes) -> None:
        """Search shared states. Only the four algorithms that use nothing but `passes` accept Passes on a GPU.

        Raises: ValueError for an empty index.
        """
        self.passes = CpuPasses(items) if isinstance(items, MolScorer) else items
        self.scorer = self.passes.scorer
        self._prepare()

    def _prepare(self) -> None: ...

    @property
    def num_items(self) -> int:
        return self.passes.num_items

    @property
    def row_codes(self) -> Mapping[str, RowCodes]:
        """Item codes that searches read, by key."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the scorer; subclasses add the bytes of their structures."""
        return self.passes.nbytes

    def check(self, queries: QueryStates, k: int, allowed: Mask | None) -> None:
        """Check a request. Raises: as `Index.search`."""
        check_request(k=k, allowed=allowed, num_queries=len(queries), num_items=self.num_items)
        self.scorer.check(queries)

    def every_item(self, queries: QueryStates) -> Indices:
        return np.full(len(queries), self.num_items, dtype=np.int64)
