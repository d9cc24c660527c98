"""A bundle's items as trained: ids, titles, categories and states, named by one index version.

Candidates and reranker start from it, so their versions agree; `live_catalogue.py` applies changes.

Letters: X items.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.algorithms.bundles.model_bundle import ITEMS, Bundle, Manifest
from services.algorithms.bundles.model_manifest import errors_of
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.algorithms.item_table.attributes import AttributeTable, no_attributes
from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Indices, Strings
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.algorithms.scoring.states import ItemStates, PairGate

# Bytes per id for its hash. A part copies its ids, so it also has sorted hashes and rows.
_HASH_BYTES, _PART_HASH_BYTES = 8, 20
# Bytes of an id as a Python object with a reference; 61 on MovieLens-1M.
_ID_OBJECT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """X items of one model, in the bundle's order.

    user_component: the query component that identifies the user, if any. is_normalised: components have at most length
    1, unlike imported embeddings. version: the whole catalogue's index version, if known. rows: each id's row. voting:
    the whole catalogue's ids; `neighbours` has their rows.
    """

    model_version: str
    index_version: str = field(init=False)
    rows: ItemIds = field(init=False)
    version: str = ""
    voting: ItemIds = field(default_factory=lambda: ItemIds.of(()))
    item_ids: Collection[str]
    titles: Sequence[str]
    categories: Sequence[Sequence[str]]
    states: ItemStates
    pair_gate: PairGate | None
    user_component: int | None = None
    is_normalised: bool = True
    neighbours: ItemNeighbours | None = None
    codebooks: Codebooks | None = None
    attributes: AttributeTable = field(default_factory=lambda: no_attributes(0))

    def __post_init__(self) -> None:
        """Raise ValueError if columns disagree in length or an id repeats."""
        ids = self.item_ids if isinstance(self.item_ids, ItemIds) else ItemIds.of(self.item_ids)
        object.__setattr__(self, "rows", ids)
        for name in ("titles", "categories", "states"):
            if len(getattr(self, name)) != len(self.item_ids):
                raise ValueError(f"{len(self.item_ids)} item ids but {name} of {len(getattr(self, name))} items")
        if not self.attributes.kinds:
            object.__setattr__(self, "attributes", no_attributes(len(self.item_ids)))
        if self.attributes.num_items != len(self.item_ids):
            raise ValueError(f"{len(self.item_ids)} item ids but attributes of {self.attributes.num_items} items")
        version = self.version or f"{self.model_version}.{_content_hash(ids, self.states)}"
        object.__setattr__(self, "index_version", version)
        if not len(self.voting):
            object.__setattr__(self, "voting", ids)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def batch(self) -> ItemBatch:
        return ItemBatch(
            item_ids=self.rows,
            states=self.states,
            categories=Categories.of(self.categories),
            attributes=self.attributes,
        )

    def part(self, rows: Indices) -> "Catalogue":
        """A catalogue with copies of some rows, but with the neighbours and `voting` of the whole catalogue."""
        return replace(
            self,
            version=self.index_version,
            item_ids=ItemIds(self.rows.strings.taken(rows), self.rows.hashes[rows]),
            titles=Strings.of(self.titles).taken(rows),
            categories=Categories.of(self.categories).take(rows),
            states=self.states.take(rows),
            attributes=self.attributes.take(rows),
        )

    def states_of(self, item_ids: Sequence[str]) -> ItemStates:
        """Some items' states. Raises: KeyError for an unknown item."""
        return self.states.take([self.rows[item_id] for item_id in item_ids])


def catalogue_from_bundle(bundle: Bundle, rows: Indices | None = None) -> Catalogue:
    """Load a bundle's items, or only `rows`; states of other rows are neither checked nor loaded. Raises: BundleError
    if files disagree.
    """
    encoder = bundle.manifest.encoder
    has_users = encoder is not None and encoder.uses_user_index
    with errors_of(bundle.path):
        ids, titles, categories, attributes = bundle.item_index, bundle.titles, bundle.categories, bundle.attributes
        if rows is not None:
            ids, titles = ItemIds(ids.strings.taken(rows), ids.hashes_of(rows)), titles.taken(rows)
            categories, attributes = categories.take(rows), attributes.take(rows)
        return Catalogue(
            model_version=bundle.model_version,
            version=f"{bundle.model_version}.{bundle.items_digest}",
            item_ids=ids,
            titles=titles,
            categories=categories,
            states=bundle.item_states if rows is None else bundle.item_states_of(rows),
            pair_gate=bundle.pair_gate,
            user_component=bundle.num_query_components - 1 if has_users else None,
            is_normalised=encoder is not None,
            neighbours=bundle.neighbours,
            voting=ids if bundle.neighbours is None else bundle.item_index,
            codebooks=bundle.codebooks,
            attributes=attributes,
        )


def required_bytes(manifest: Manifest, *, parts: int = 1) -> int:
    """Estimate the bytes of a catalogue of this shape, or of one of its `parts`, without reading an array.

    It counts components (mapped), the gate twice (mapped and transposed), averaged components, the items file and
    hashes of ids. With neighbours, a part also has its ids as objects and, for all items, neighbours with weights and a
    row number.
    """
    head = manifest.head
    gate = 2 * head.num_pairs if head.is_mixture else 0
    floats = head.num_item_components * head.component_width + gate + head.component_width + 1
    each = 4 * floats + 16 + (_HASH_BYTES if parts == 1 else _PART_HASH_BYTES)
    if manifest.neighbours is None:
        return (manifest.num_items * each + manifest.files[ITEMS].bytes) // parts
    own = manifest.num_items * (each + _ID_OBJECT_BYTES) + manifest.files[ITEMS].bytes
    return own // parts + manifest.num_items * (8 * manifest.neighbours.num_neighbours + 4)


def _content_hash(ids: ItemIds, items: ItemStates) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(ids.strings.data).data)
    digest.update(np.ascontiguousarray(ids.strings.ends).data)
    digest.update(np.ascontiguousarray(items.components).data)
    if items.gate is not None:
        digest.update(np.ascontiguousarray(items.gate).data)
    return digest.hexdigest()[:8]
