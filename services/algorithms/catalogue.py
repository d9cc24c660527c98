"""A bundle's items made ready to answer: ids, rules and scorer, named by one index version.

What candidates and reranker both hold, so that they agree on rows, on ties and on the version they speak of. It needs
PyTorch; a process that only carries states reads the bundle instead.

Letters: X items, P_x item components, P pairs, d component width.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.bundle import Bundle, Manifest
from services.algorithms.filters import CatalogueRules
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.states import ItemStates, PairGate, QueryStates

# Ids, their index and category lists as Python objects: measured 410 bytes per item on MovieLens-1M, rounded up.
_OBJECT_BYTES_PER_ITEM = 512


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """X items of one model. `tie_ranks` (X,): each item's place in id order."""

    model_version: str
    index_version: str
    item_ids: list[str]
    tie_ranks: npt.NDArray[np.int64]
    rules: CatalogueRules
    scorer: MolScorer

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    def check(self, queries: QueryStates) -> None:
        """Raise ValueError, naming both values, if these queries cannot be scored against these items."""
        self.scorer.check(queries)


def make_catalogue(
    *,
    model_version: str,
    item_ids: Sequence[str],
    categories: Sequence[Sequence[str]],
    items: ItemStates,
    pair_gate: PairGate | None,
) -> Catalogue:
    """Prepare items for answering. Raises ValueError if columns, gates and components disagree or an id repeats."""
    if len(item_ids) != len(items):
        raise ValueError(f"{len(item_ids)} item ids but states of {len(items)} items")
    index = {item_id: row for row, item_id in enumerate(item_ids)}
    if len(index) != len(item_ids):
        raise ValueError(f"{len(item_ids)} item ids but only {len(index)} distinct ones")
    ranks = np.empty(len(item_ids), dtype=np.int64)
    # Code point order, which is the byte order of UTF-8 too.
    ranks[sorted(range(len(item_ids)), key=item_ids.__getitem__)] = np.arange(len(item_ids))
    return Catalogue(
        model_version=model_version,
        index_version=f"{model_version}.{_content_hash(item_ids, items)}",
        item_ids=list(item_ids),
        tie_ranks=ranks,
        rules=CatalogueRules(index, categories),
        scorer=MolScorer(items, pair_gate),
    )


def catalogue_from_bundle(bundle: Bundle) -> Catalogue:
    """Prepare a bundle's items. Raises ValueError if its files disagree with each other."""
    return make_catalogue(
        model_version=bundle.model_version,
        item_ids=bundle.item_ids,
        categories=bundle.categories,
        items=bundle.item_states,
        pair_gate=bundle.pair_gate,
    )


def required_bytes(manifest: Manifest) -> int:
    """Bytes that a catalogue of this shape will take, known before any array is read.

    Components once (mapped), the gate twice (mapped and transposed), averaged components, and ids as Python objects.
    """
    head = manifest.head
    gate = 2 * head.num_pairs if head.is_mixture else 0
    floats = head.num_item_components * head.component_width + gate + head.component_width + 1
    return manifest.num_items * (4 * floats + 16 + _OBJECT_BYTES_PER_ITEM)


def _content_hash(item_ids: Sequence[str], items: ItemStates) -> str:
    digest = hashlib.sha256("\0".join(item_ids).encode())
    digest.update(np.ascontiguousarray(items.components).data)
    if items.gate is not None:
        digest.update(np.ascontiguousarray(items.gate).data)
    return digest.hexdigest()[:8]
