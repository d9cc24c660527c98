"""The items by row: ids, words, categories, and who may be answered now.

Rows are the text bundle's documents, then the model bundle's other items, then whatever the topic `items` brings; a row
is never given to another item. It knows neither sources nor streams.

Letters: R rows.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.algorithms.rules.attributes import AttributeColumns, AttributeTable, Kinds, no_attributes
from services.algorithms.rules.filters import ItemFilter
from services.contracts.topics.items import CatalogueItem

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Changes:
    """Rows with other words than before, rows whose title is another one, and rows that may not be answered now."""

    words: dict[int, str] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)


class ItemTable:
    """One thread describes items; any number of threads read."""

    def __init__(
        self,
        item_ids: Sequence[str],
        titles: Sequence[str],
        categories: Sequence[Sequence[str]],
        documents: Mapping[str, str],
        attributes: AttributeTable | None = None,
    ) -> None:
        """The model bundle's items, and the text bundle's documents by item id in their order (none: empty)."""
        described = {
            item_id: (title, tuple(own)) for item_id, title, own in zip(item_ids, titles, categories, strict=True)
        }
        self._documents = documents
        self._ids = [*documents, *(item_id for item_id in item_ids if item_id not in documents)]
        self._rows = {item_id: row for row, item_id in enumerate(self._ids)}
        self._titles = [described.get(item_id, ("", ()))[0] for item_id in self._ids]
        self._first_titles = dict(enumerate(self._titles))
        self._categories = [described.get(item_id, ("", ()))[1] for item_id in self._ids]
        self._attributes = AttributeColumns((attributes or no_attributes(len(item_ids))).of_items(item_ids, self._ids))
        self._members: dict[str, set[int]] = {}
        for row, names in enumerate(self._categories):
            for name in names:
                self._members.setdefault(name, set()).add(row)
        self._is_served = bytearray(b"\1") * len(self._ids)
        self._lock = threading.Lock()

    @property
    def kinds(self) -> Kinds:
        """Of attributes."""
        return self._attributes.kinds

    def words(self) -> list[str]:
        """What each row's item is found by: (R,)."""
        return [self._words(row) for row in range(len(self._ids))]

    def ids(self, rows: Iterable[int]) -> list[str]:
        """The items of some rows."""
        return [self._ids[row] for row in rows]

    def allowed(self, wanted: ItemFilter) -> Mask:
        """Which rows may be answered: (R,). Unknown ids and categories match nothing."""
        with self._lock:
            passes = np.frombuffer(self._is_served, dtype=bool).copy()
            if wanted.allow_item_ids:
                passes &= self._mask(self._known(wanted.allow_item_ids))
            if wanted.allow_categories:
                passes &= self._mask(self._of_categories(wanted.allow_categories))
            if wanted.deny_categories:
                passes &= ~self._mask(self._of_categories(wanted.deny_categories))
            if wanted.where:
                passes &= self._attributes.mask(wanted.where)
            passes[self._known(wanted.deny_item_ids)] = False
            return passes

    def describe(self, items: Sequence[CatalogueItem]) -> Changes:
        """Take what the catalogue says of items, whole; of several for one item the last one counts."""
        changes = Changes()
        with self._lock:
            for item in {item.item_id: item for item in items}.values():
                row = self._rows.get(item.item_id)
                if row is None:
                    row = self._add(item.item_id)
                if item.title and item.title != self._titles[row]:
                    changes.titles[row] = item.title
                words, was_served = self._words(row), bool(self._is_served[row])
                for name in self._categories[row]:
                    self._members[name].discard(row)
                for name in item.categories:
                    self._members.setdefault(name, set()).add(row)
                self._titles[row], self._categories[row] = item.title, item.categories
                self._attributes.put(row, item.attributes)
                self._is_served[row] = item.is_served
                if not item.is_served:
                    changes.hidden.add(row)
                elif not was_served or self._words(row) != words:
                    changes.words[row] = self._words(row)
        return changes

    def _add(self, item_id: str) -> int:
        row = len(self._ids)
        self._ids.append(item_id)
        self._rows[item_id] = row
        self._titles.append("")
        self._categories.append(())
        self._is_served.append(True)
        return row

    def _words(self, row: int) -> str:
        """The title, or the text bundle's document where that is more than the title was; and the categories."""
        title, first = self._titles[row], self._first_titles.get(row, "")
        document = self._documents.get(self._ids[row], "")
        if document in ("", first):
            text = title or first
        else:
            text = document if title in document else f"{title} {document}"
        return " ".join([text, *(name for name in self._categories[row] if name not in text)])

    def _known(self, item_ids: Sequence[str]) -> list[int]:
        return [self._rows[item_id] for item_id in item_ids if item_id in self._rows]

    def _of_categories(self, names: Sequence[str]) -> list[int]:
        return [row for name in names for row in self._members.get(name, ())]

    def _mask(self, rows: Sequence[int]) -> Mask:
        out = np.zeros(len(self._ids), dtype=bool)
        out[list(rows)] = True
        return out
