"""What `LiveCatalogue.capture` stores in a snapshot besides items: the last stream position, and evidence."""

from dataclasses import dataclass
from types import NoneType

import numpy as np

from services.algorithms.indexes.mutable.snapshot import Snapshot, SnapshotError
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.scoring.states import MAX_LENGTH, MAX_OWN_LENGTH, ItemStates, check_sizes, shape_of


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChanges:
    """Evidence (lambda and interactions) by item, and states of items not served."""

    position: int
    mark: str
    newest_recorded_ms: int | None
    evidence: dict[str, tuple[float, int]]
    aside: dict[str, ItemStates]

    @classmethod
    def of(cls, snapshot: Snapshot, base: Catalogue) -> "StoredChanges":
        """Read a snapshot. Raises: SnapshotError if items or shapes differ, or arrays are inconsistent."""
        manifest, details = snapshot.manifest, snapshot.manifest.said
        if (of := details.get("base")) != base.index_version:
            raise SnapshotError(f"{snapshot.path}: changes of {of!r}; this process serves {base.index_version!r}")
        if manifest.shape != (shape := shape_of(base.states, base.pair_gate)):
            raise SnapshotError(f"{snapshot.path}: states of {manifest.shape}; allowed: {shape}")
        try:
            return cls._read(snapshot, base.states, MAX_LENGTH if base.is_normalised else MAX_OWN_LENGTH)
        except (KeyError, ValueError, TypeError, IndexError) as exc:
            raise SnapshotError(f"{snapshot.path}: {exc!r}") from exc

    @classmethod
    def _read(cls, snapshot: Snapshot, checked: ItemStates, longest: float) -> "StoredChanges":
        details, columns, items = snapshot.manifest.said, snapshot.columns, snapshot.items
        if not all(isinstance(item_id, str) for item_id in details["aside"]):
            raise SnapshotError("aside contains a value that is not an item id")
        position, newest_recorded_ms, mark = details["position"], details["newest_recorded_ms"], details["mark"]
        if type(position) is not int or type(newest_recorded_ms) not in (int, NoneType) or type(mark) is not str:
            raise SnapshotError(f"it says {position=}, {newest_recorded_ms=}, {mark=}")
        num_items, names = len(items), list(details["aside"])
        shares, counts = columns["model_share"], columns["num_interactions"]
        if not len(shares) == len(counts) == num_items + len(names):
            raise SnapshotError(f"evidence of {len(shares)} and {len(counts)} items; expected {num_items + len(names)}")
        known = np.flatnonzero(~np.isnan(shares))
        rows = known[known < num_items]
        changed = [*items.ids.strings.take(rows), *(names[row - num_items] for row in known[len(rows) :].tolist())]
        evidence = zip(shares[known].tolist(), counts[known].tolist(), strict=True)
        gated = items.states.gate is not None
        aside = {
            item_id: ItemStates(
                components=columns[f"aside.{row}.components"], gate=columns[f"aside.{row}.gate"] if gated else None
            )
            for row, item_id in enumerate(names)
        }
        for states in (*(() if items.states is checked else (items.states,)), *aside.values()):
            snapshot.manifest.shape.check_items(states)
            check_sizes(states.components, states.gate, longest=longest)
        return cls(
            position=position,
            mark=mark,
            newest_recorded_ms=newest_recorded_ms,
            evidence={
                item_id: (float(share), int(count)) for item_id, (share, count) in zip(changed, evidence, strict=True)
            },
            aside=aside,
        )
