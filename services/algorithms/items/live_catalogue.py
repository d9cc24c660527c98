"""A catalogue that changes while it answers: refreshed states; new, withdrawn and returning items; versions by name.

It applies the stream's changes to a mutable index of a bundle's items. The first version's name is the bundle's index
version. Names identify versions; positions order them. The last versions stay available, so that a reranker can score a
pool with the version that made it. This module reads no stream and no clock.

Letters: P_x item components, P pairs, d component width.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from services.algorithms.indexes.mutable.index import Build, MutableIndex
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.mutable.lookup import find_items
from services.algorithms.indexes.mutable.snapshot import Snapshot, write_snapshot
from services.algorithms.indexes.mutable.version import Version
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.item_table.categories import Categories
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.stored_changes import StoredChanges
from services.algorithms.rules.attributes import Values
from services.algorithms.rules.filters import ItemFilter, ListedItems, Mask, passing
from services.algorithms.scoring.states import FloatArray, ItemStates, QueryStates, check_sizes

NO_CHANGE = -1  # the position before any change
# At 30 batches a second, 64 versions last two seconds; requests that name an earlier version arrive within
# milliseconds.
MAX_VERSIONS = 64
_UNTOUCHED = (math.nan, 0)  # evidence in a snapshot for an item with the bundle's state


class ItemChange(Protocol):
    """An item's refreshed state. A `dropped` item returns to the bundle's state; an item outside the bundle
    leaves the index.

    Shapes: components (P_x, d), gate (P,) or None. model_share: lambda, the weight of the bundle's state, 0 if there is
    none.
    """

    @property
    def item_id(self) -> str: ...
    @property
    def components(self) -> FloatArray: ...
    @property
    def gate(self) -> FloatArray | None: ...
    @property
    def model_share(self) -> float: ...
    @property
    def num_interactions(self) -> int: ...
    @property
    def dropped(self) -> bool: ...


class Description(Protocol):
    """An item in the stream's catalogue; `is_served` is False while it is withdrawn or unavailable."""

    @property
    def item_id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def categories(self) -> Sequence[str]: ...
    @property
    def attributes(self) -> Values: ...
    @property
    def is_served(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A version: its name, its position and mark (see `LiveCatalogue.apply`), and its freshness.

    newest_recorded_ms: when the version's newest interaction was recorded, Unix milliseconds. lag_s: seconds from then
    until a version first had that interaction, None after a start from a snapshot. Both are None before the first
    interaction.
    """

    name: str
    position: int
    version: Version
    mark: str = ""
    newest_recorded_ms: int | None = None
    lag_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedItem:
    """An item in one version: its state (one row), the bundle's state, lambda and the number of interactions.

    base is None for an item outside the bundle.
    """

    served: Served
    state: ItemStates
    base: ItemStates | None
    model_share: float
    num_interactions: int
    title: str


class LiveCatalogue:
    """One writer at a time applies changes; any number of threads read."""

    def __init__(
        self,
        base: Catalogue,
        *,
        build: Build,
        max_bytes: int | None = None,
        max_versions: int = 1,
        snapshot: Snapshot | None = None,
    ) -> None:
        """Start from the bundle's items, or from a snapshot with their later states.

        A snapshot lacks withdrawals: the caller must describe them again. build, max_bytes: see `MutableIndex`.
        Raises: SnapshotError for a snapshot of another bundle or with inconsistent arrays; IndexFullError if
        `max_bytes` is too small; the errors of `MutableIndex`.
        """
        self.base, self._categories = base, Categories.of(base.categories)
        self._writing = threading.Lock()
        self._described: dict[str, Description] = {}
        self._evidence: dict[str, tuple[float, int]] = {}  # refreshed items' lambda and interactions
        self._aside: dict[str, ItemStates] = {}  # refreshed states of items not served
        self._max_versions = max_versions
        self._kept: tuple[Served, ...] = ()
        if snapshot is None:
            self.index = MutableIndex(
                base.batch, base.pair_gate, model_version=base.model_version, build=build, max_bytes=max_bytes
            )
            self._publish(NO_CHANGE, None, None, "")
        else:
            self._start_from(snapshot, build, max_bytes)

    def _start_from(self, snapshot: Snapshot, build: Build, max_bytes: int | None) -> None:
        """Build the main segment from the snapshot's coded items, or from all if none is coded. Insert the other
        items.
        """
        stored, base, items = StoredChanges.of(snapshot, self.base), self.base, snapshot.items
        count = snapshot.codes.num_rows or len(items)
        rows = base.rows.rows_of(items.ids)
        is_base = not stored.evidence and len(rows) == base.num_items and (rows == np.arange(len(rows))).all()
        main = rows[:count]
        batch = ItemBatch(
            item_ids=base.rows if is_base and count == len(rows) else items.ids.first(count),
            # If the states equal the bundle's, use these, because processes share their memory.
            states=(base.states if is_base else items.states).take(slice(0, count)),
            categories=self._categories.take(main),
            attributes=base.attributes.take(main),
        )
        self.index = MutableIndex(
            batch,
            base.pair_gate,
            model_version=base.model_version,
            build=build,
            max_bytes=max_bytes,
            number=snapshot.manifest.number,
            digest=snapshot.manifest.digest,
        )
        hidden = np.ones(base.num_items, dtype=bool)
        hidden[rows[rows >= 0]] = False
        known = base.rows.find(list(stored.aside))
        hidden[known[known >= 0]] = False
        absent = np.flatnonzero(hidden)
        parts = [items.states.take(slice(count, None)), *stored.aside.values(), base.states.take(absent)]
        item_ids = [*items.ids.strings[count:], *stored.aside, *base.rows.strings.take(absent)]
        if item_ids:
            self._upsert(item_ids, ItemStates.joined(parts))
        self._evidence = stored.evidence
        self._publish(stored.position, stored.newest_recorded_ms, None, stored.mark)

    # -- readers ----------------------------------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        """The newest version. A merge keeps its content."""
        return self._merged(self._kept[-1])

    def version_named(self, name: str, position: int | None = None) -> tuple[Served, bool]:
        """Return the version of that name and True. If it is not available, return the version nearest to `position`
        (default: the newest) and False.
        """
        versions = self._kept
        for served in reversed(versions):
            if served.name == name:
                return self._merged(served), True
        if position is None:
            return self.served, False
        return self._merged(min(versions, key=lambda served: abs(served.position - position))), False

    def may_come(self, name: str, position: int | None = None) -> bool:
        """Whether a missing version may arrive soon: its position is unknown, or after the newest version's."""
        versions = self._kept
        return all(served.name != name for served in versions) and (
            position is None or position > versions[-1].position
        )

    def is_hidden(self, item_id: str) -> bool:
        """Whether the item is not served now, even if an older version has it."""
        description = self._described.get(item_id)
        return description is not None and not description.is_served

    def absence_of(self, item_id: str) -> str:
        """Why the newest version lacks this item's state, as the end of a sentence."""
        if self.is_hidden(item_id):
            return "is withdrawn or not available"
        if item_id in self._described:
            return "has no state yet: it has had no interaction since it was put, and no state was made from its text"
        return "is no item of this index"

    def categories_of(self, item_ids: Sequence[str]) -> list[Sequence[str]]:
        """Each item's categories, from its description or the bundle; an unknown item has none."""
        rows = self.base.rows.find(item_ids)
        described = map(self._described.get, item_ids)
        listed = self._categories.take(rows)
        return [names if one is None else one.categories for one, names in zip(described, listed, strict=True)]

    def attributes_of(self, item_id: str) -> Values:
        description = self._described.get(item_id)
        if description is not None:
            return description.attributes
        row = self.base.rows.get(item_id)
        return {} if row is None else self.base.attributes.of_row(row)

    def passing(self, wanted: ItemFilter, item_ids: Sequence[str]) -> Mask:
        """Which of n items pass a filter, by their present descriptions: (n,)."""
        asks_categories = wanted.allow_categories or wanted.deny_categories
        categories = self.categories_of(item_ids) if asks_categories else [()] * len(item_ids)
        attributes = [self.attributes_of(item_id) for item_id in item_ids] if wanted.where else ()
        return passing(wanted, ListedItems(item_ids, categories, attributes))

    def title_of(self, item_id: str) -> str:
        description = self._described.get(item_id)
        if description is not None:
            return description.title
        row = self.base.rows.get(item_id)
        return "" if row is None else self.base.titles[row]

    def explain(self, item_id: str) -> ExplainedItem | None:
        """An item of the newest version; None if it has no state or is not served."""
        with self._writing:  # state and evidence must be of one version
            served = self._kept[-1]
            found = find_items(served.version, [item_id])
            if not len(found):
                return None
            model_share, num_interactions = self._evidence.get(item_id, (1.0, 0))
            return ExplainedItem(
                served=served,
                state=found.states(),
                base=self.base.states_of([item_id]) if item_id in self.base.rows else None,
                model_share=model_share,
                num_interactions=num_interactions,
                title=self.title_of(item_id),
            )

    def check(self, queries: QueryStates) -> None:
        """Check like `ItemShape.check_queries`; if the base is normalised, also raise ValueError for too long
        components.
        """
        self.index.shape.check_queries(queries)
        if self.base.is_normalised:
            check_sizes(queries.components)

    # -- the writer -------------------------------------------------------------------------------------------------

    def apply(
        self,
        position: int,
        changes: Sequence[ItemChange],
        *,
        mark: str = "",
        newest_recorded_ms: int | None = None,
        lag_s: float | None = None,
    ) -> tuple[str, ...]:
        """Apply a batch of changes as one version at `position`; return the ids whose states do not fit the model.

        Only an item's last change is applied. mark: distinguishes batches of equal position in different logs; part of
        the version's name. The version gets the latest `newest_recorded_ms` so far and its lag.
        Raises: ValueError for a malformed id, IndexFullError without enough room; then nothing has changed.
        """
        changes = list({one.item_id: one for one in changes}.values())
        misfits = [one.item_id for one in changes if not one.dropped and not self._fits(one)]
        states = {one.item_id: _state(one) for one in changes if not one.dropped and one.item_id not in misfits}
        dropped = [one.item_id for one in changes if one.dropped]
        with self._writing:
            back = {item_id: self.base.states_of([item_id]) for item_id in dropped if item_id in self.base.rows}
            visible = {item_id: one for item_id, one in (states | back).items() if not self.is_hidden(item_id)}
            gone = [item_id for item_id in dropped if item_id not in back and not self.is_hidden(item_id)]
            self._change(visible, gone)
            for one in changes:
                if one.item_id in states:
                    self._evidence[one.item_id] = (one.model_share, one.num_interactions)
                    if one.item_id not in visible:
                        self._aside[one.item_id] = states[one.item_id]
            for item_id in dropped:
                self._evidence.pop(item_id, None)
                self._aside.pop(item_id, None)
            before = self._kept[-1]
            known = before.newest_recorded_ms
            if newest_recorded_ms is None or (known is not None and known >= newest_recorded_ms):
                newest_recorded_ms, lag_s = known, before.lag_s
            self._publish(position, newest_recorded_ms, lag_s, mark)
        return tuple(misfits)

    def describe(self, descriptions: Sequence[Description]) -> None:
        """Apply titles, categories, attributes, withdrawals and returns; only an item's last description is applied.

        `apply` still refreshes a withdrawn item's state. Versions' positions and names stay. Raises: IndexFullError
        without room for returning items; then only the withdrawals are applied.
        """
        newest = {one.item_id: one for one in descriptions}
        with self._writing:
            hidden = {item_id: one for item_id, one in newest.items() if not one.is_served}
            found = find_items(self.index.version, list(hidden))
            if len(found):
                self._keep_aside([item_id for item_id in found.item_ids if item_id in self._evidence])
                self._change({}, found.item_ids)
            self._described.update(hidden)
            self._publish_again()
            shown = {item_id: one for item_id, one in newest.items() if one.is_served}
            returning = [item_id for item_id in shown if self.is_hidden(item_id)]
            earlier_names = self.categories_of(list(shown))
            renamed = [
                item_id
                for (item_id, one), names in zip(shown.items(), earlier_names, strict=True)
                if set(one.categories) != set(names) or dict(one.attributes) != self.attributes_of(item_id)
            ]
            states = self._states_of([*returning, *(item_id for item_id in renamed if item_id not in returning)])
            earlier = {item_id: self._described.get(item_id) for item_id in shown}
            self._described.update(shown)
            try:
                self._change(states, ())
            except ValueError:
                for item_id, description in earlier.items():
                    if description is None:
                        del self._described[item_id]
                    else:
                        self._described[item_id] = description
                raise
            for item_id in returning:
                self._aside.pop(item_id, None)
            for item_id, one in shown.items():
                if self._is_bundled(one):
                    del self._described[item_id]
            self._publish_again()

    def reset(self) -> None:
        """Return to the bundle's states and drop earlier versions: their positions are invalid."""
        with self._writing:
            refreshed = list(self._evidence)
            back = {item_id: self.base.states_of([item_id]) for item_id in refreshed if item_id in self.base.rows}
            self._change(
                {item_id: state for item_id, state in back.items() if not self.is_hidden(item_id)},
                [item_id for item_id in refreshed if item_id not in back],
            )
            self._evidence.clear()
            self._aside.clear()
            self._publish(NO_CHANGE, None, None, "", others=())

    def capture(self, **said: int) -> Callable[[Path], Path]:
        """A function that later, in any thread, writes the present content as a snapshot below a folder.

        said: the caller's manifest fields.
        """
        with self._writing:
            served, evidence, aside = self.served, dict(self._evidence), dict(self._aside)

        def columns(item_ids: Strings) -> dict[str, np.ndarray]:
            shares, counts = (
                np.full(len(item_ids) + len(aside), math.nan),
                np.zeros(len(item_ids) + len(aside), np.int64),
            )
            refreshed = [*(set(evidence) - set(aside)), *aside]
            rows = ItemIds(item_ids).find(refreshed) if refreshed else np.zeros(0, np.int64)
            rows[len(refreshed) - len(aside) :] = len(item_ids) + np.arange(len(aside))
            for item_id, row in zip(refreshed, rows.tolist(), strict=True):
                shares[row], counts[row] = evidence.get(item_id, _UNTOUCHED)
            return {
                "model_share": shares,
                "num_interactions": counts,
                **{f"aside.{row}.components": state.components for row, state in enumerate(aside.values())},
                **{f"aside.{row}.gate": one.gate for row, one in enumerate(aside.values()) if one.gate is not None},
            }

        content = {
            "base": self.base.index_version,
            "position": served.position,
            "mark": served.mark,
            "newest_recorded_ms": served.newest_recorded_ms,
            "aside": list(aside),
            **said,
        }
        main = served.version.main
        is_changed = (
            main is None or main.num_dead or served.version.delta() or main.segment.rows.ids is not self.base.rows
        )
        return lambda root: write_snapshot(
            root, self.index, version=served.version, said=content, columns=columns, with_states=bool(is_changed)
        )

    def _change(self, states: dict[str, ItemStates], removals: Sequence[str]) -> None:
        """Insert and remove as one index version, under the writer's lock."""
        if states:
            self._upsert(list(states), ItemStates.joined(list(states.values())), removals)
        elif removals:
            self.index.apply(removals=removals)

    def _upsert(self, item_ids: list[str], states: ItemStates, removals: Sequence[str] = ()) -> None:
        categories = self.categories_of(item_ids)
        attributes = AttributeTable.of(self.index.kinds, [self.attributes_of(item_id) for item_id in item_ids])
        batch = ItemBatch(item_ids=item_ids, states=states, categories=categories, attributes=attributes)
        self.index.apply(upserts=batch, removals=removals)

    def _publish(
        self,
        position: int,
        newest_recorded_ms: int | None,
        lag_s: float | None,
        mark: str,
        others: Sequence[Served] | None = None,
    ) -> None:
        """Publish a version. others: earlier versions to retain; None means those at other positions."""
        base = self.base.index_version
        served = Served(
            name=base if position == NO_CHANGE else f"{base}+{position}{mark and '.'}{mark}",
            position=position,
            version=self.index.version,
            mark=mark,
            newest_recorded_ms=newest_recorded_ms,
            lag_s=lag_s,
        )
        if others is None:
            others = [one for one in self._kept if one.position != position]
        self._kept = (*others[max(0, len(others) - self._max_versions + 1) :], served)

    def _publish_again(self) -> None:
        before = self._kept[-1]
        self._publish(before.position, before.newest_recorded_ms, before.lag_s, before.mark)

    def _merged(self, served: Served) -> Served:
        newest = self.index.version
        if newest is served.version or newest.number != served.version.number:
            return served
        return replace(served, version=newest)

    def _is_bundled(self, one: Description) -> bool:
        row = self.base.rows.get(one.item_id, -1)
        if row < 0 or one.title != self.base.titles[row] or tuple(one.categories) != self._categories[row]:
            return False
        return dict(one.attributes) == self.base.attributes.of_row(row)

    def _keep_aside(self, item_ids: Sequence[str]) -> None:
        for item_id in item_ids:
            self._aside[item_id] = find_items(self.index.version, [item_id]).states()

    def _states_of(self, item_ids: Sequence[str]) -> dict[str, ItemStates]:
        states: dict[str, ItemStates] = {}
        for item_id in item_ids:
            found = find_items(self.index.version, [item_id])
            if len(found):
                states[item_id] = found.states()
            elif item_id in self._aside:
                states[item_id] = self._aside[item_id]
            elif item_id in self.base.rows:
                states[item_id] = self.base.states_of([item_id])
        return states

    def _fits(self, one: ItemChange) -> bool:
        shape = self.index.shape
        gate = None if one.gate is None else one.gate.shape
        return one.components.shape == (shape.num_components, shape.width) and gate == (
            (shape.num_pairs,) if shape.gated else None
        )


def _state(one: ItemChange) -> ItemStates:
    return ItemStates(components=one.components[None], gate=None if one.gate is None else one.gate[None])
