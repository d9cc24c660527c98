"""The items by row: ids, words, categories, and which are served.

Rows are the text bundle's documents, then the model bundle's other items, then new items of topic `items`. A row's item
does not change.

Letters: R rows.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.algorithms.item_table.attributes import AttributeRows, AttributeTable, no_attributes
from services.algorithms.item_table.categories import Categories, CategoryRows, Rows
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.rules.attributes import Condition, Kinds
from services.algorithms.rules.filters import ItemFilter, passing
from services.contracts.topics.items import CatalogueItem

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Changes:
    """Changed words and titles by row, and rows that are not served."""

    words: dict[int, str] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The model bundle's items."""

    ids: ItemIds
    titles: Strings
    categories: Categories


class ItemTable:
    """One thread describes items; any number of threads read."""

    def __init__(
        self,
        item_ids: Iterable[str],
        titles: Sequence[str],
        categories: Sequence[Sequence[str]],
        document_ids: Iterable[str] = (),
        texts: Iterable[str] = (),
        attributes: AttributeTable | None = None,
    ) -> None:
        """Take columns without copying them. document_ids, texts: the text bundle's items and documents. The other
        columns are the model bundle's.
        """
        ids = item_ids if isinstance(item_ids, ItemIds) else ItemIds.of(item_ids)
        self._items = _Columns(ids, Strings.of(titles), Categories.of(categories))
        self._documents = document_ids if isinstance(document_ids, ItemIds) else ItemIds.of(document_ids)
        self._texts = Strings.of(texts)
        described = ids.find(list(self._documents))
        others = np.setdiff1d(np.arange(len(ids)), described)
        # The index of each row's item in the model bundle, or -1, and each bundle item's row.
        self._bundled = np.concatenate([described, others]).astype(np.int32)
        here = np.flatnonzero(self._bundled >= 0)
        self._row = np.empty(len(ids), np.int32)
        self._row[self._bundled[here]] = here
        self._members = CategoryRows(self._items.categories, self._row)
        self._attributes = AttributeRows(attributes or no_attributes(len(ids)), self._bundled)
        # title and categories, if they differ from the bundle's
        self._described: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._new_ids: list[str] = []
        self._new_rows: dict[str, int] = {}
        self._is_served = bytearray(b"\1") * len(self._bundled)
        self._lock = threading.Lock()

    @property
    def kinds(self) -> Kinds:
        return self._attributes.kinds

    def words(self) -> Iterator[str]:
        return (self._words(row, *self._now(row)) for row in range(len(self._is_served)))

    def ids(self, rows: Iterable[int]) -> list[str]:
        rows, first, end = list(rows), len(self._documents), len(self._bundled)
        documents = iter(self._documents.strings.take([row for row in rows if row < first]))
        others = iter(self._items.ids.strings.take(self._bundled[[row for row in rows if first <= row < end]]))
        return [
            next(documents) if row < first else next(others) if row < end else self._new_ids[row - end] for row in rows
        ]

    def allowed(self, wanted: ItemFilter) -> Mask:
        """Return which rows an answer may contain, (R,). Unknown ids and categories match nothing."""
        with self._lock:
            passes = passing(wanted, self)
            passes &= np.frombuffer(self._is_served, dtype=bool)
            return passes

    def __len__(self) -> int:
        return len(self._is_served)

    def named(self, item_ids: Sequence[str]) -> Mask:
        """Like the next two methods, part of `rules.filters.Filterable`."""
        return self._mask(self._known(item_ids))

    def of_categories(self, names: Sequence[str]) -> Mask:
        return self._mask(np.concatenate([self._members.members(name) for name in names]))

    def meeting(self, where: Sequence[Condition]) -> Mask:
        return self._attributes.mask(where)

    def describe(self, items: Sequence[CatalogueItem]) -> Changes:
        """Apply complete descriptions. An item's last description counts."""
        changes = Changes()
        with self._lock:
            for item in {item.item_id: item for item in items}.values():
                row = self._find(item.item_id)
                if row < 0:
                    row = self._add(item.item_id)
                title, names = self._now(row)
                if item.title and item.title != title:
                    changes.titles[row] = item.title
                words, was_served = self._words(row, title, names), bool(self._is_served[row])
                self._members.moved(row, set(names) - set(item.categories), set(item.categories) - set(names))
                now = item.title, tuple(item.categories)
                if now == self._first(row):
                    self._described.pop(row, None)
                else:
                    self._described[row] = now
                self._attributes.put(row, item.attributes)
                self._is_served[row] = item.is_served
                if not item.is_served:
                    changes.hidden.add(row)
                elif not was_served or self._words(row, *now) != words:
                    changes.words[row] = self._words(row, *now)
        return changes

    def _add(self, item_id: str) -> int:
        row = len(self._is_served)
        self._new_ids.append(item_id)
        self._new_rows[item_id] = row
        self._is_served.append(True)
        return row

    def _first(self, row: int) -> tuple[str, tuple[str, ...]]:
        bundled = int(self._bundled[row]) if row < len(self._bundled) else -1
        return (self._items.titles[bundled], self._items.categories[bundled]) if bundled >= 0 else ("", ())

    def _now(self, row: int) -> tuple[str, tuple[str, ...]]:
        return self._described.get(row) or self._first(row)

    def _words(self, row: int, title: str, names: Sequence[str]) -> str:
        """Return the title, the text bundle's document and the categories, without repetitions."""
        first = self._first(row)[0]
        document = self._texts[row] if row < len(self._texts) else ""
        if document in ("", first):
            text = title or first
        else:
            text = document if title in document else f"{title} {document}"
        return " ".join([text, *(name for name in names if name not in text)])

    def _find(self, item_id: str) -> int:
        bundled = self._items.ids.get(item_id, -1)
        if bundled >= 0:
            return int(self._row[bundled])
        row: int = self._documents.get(item_id, -1)
        return row if row >= 0 else self._new_rows.get(item_id, -1)

    def _known(self, item_ids: Sequence[str]) -> list[int]:
        bundled = self._items.ids.find(item_ids)
        rows = [
            self._find(item_id) if row < 0 else int(self._row[row])
            for item_id, row in zip(item_ids, bundled.tolist(), strict=True)
        ]
        return [row for row in rows if row >= 0]

    def _mask(self, rows: Sequence[int] | Rows) -> Mask:
        out = np.zeros(len(self._is_served), dtype=bool)
        out[rows] = True
        return out
