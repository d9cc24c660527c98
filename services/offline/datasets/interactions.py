"""Interactions as columns of users, items, types, values and times, in order of time.

Users and items are dense int32 codes into vocabularies. Rows are sorted by timestamp, then by original order.

Letters: N events, U users, X items.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.event_schema import EVENTS_YAML, EventSchema
from services.algorithms.encoding.actions import MIN_EVENTS, Actions, action_name

CodeArray = npt.NDArray[np.int32]
TimeArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[np.float32]
TypeCodeArray = npt.NDArray[np.int16]
RowArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """N events, oldest first.

    Shapes: users (N,) codes into user_ids; items (N,) codes into item_ids; timestamps (N,) unix seconds; values (N,);
    types (N,) codes into type_names; item_ids, titles ("" unknown) and categories (() unknown) (X,). If
    `has_times` is False, a timestamp is the position in the user's sequence (0, 1, 2, ...). `with_actions` sets actions
    (N,), each event's row of the action embedding, and outcomes (N,), the same rows with 0 for positive events.
    Raises: ValueError if lengths differ, a code is outside its vocabulary, or timestamps decrease.
    """

    users: CodeArray
    items: CodeArray
    timestamps: TimeArray
    values: ValueArray
    types: TypeCodeArray
    user_ids: list[str]
    item_ids: list[str]
    type_names: list[str]
    titles: list[str]
    categories: list[tuple[str, ...]]
    name: str
    source: str
    has_times: bool = True
    actions: TypeCodeArray | None = None
    outcomes: TypeCodeArray | None = None

    def __post_init__(self) -> None:
        for column in ("items", "timestamps", "values", "types"):
            if len(getattr(self, column)) != len(self.users):
                raise ValueError(f"{column} has {len(getattr(self, column))} rows; users has {len(self.users)}")
        for column in ("titles", "categories"):
            if len(getattr(self, column)) != len(self.item_ids):
                raise ValueError(f"{column} has {len(getattr(self, column))} rows; item_ids has {len(self.item_ids)}")
        _check_codes("users", self.users, len(self.user_ids))
        _check_codes("items", self.items, len(self.item_ids))
        _check_codes("types", self.types, len(self.type_names))
        if len(self.timestamps) > 1:
            decreasing = np.flatnonzero(self.timestamps[1:] < self.timestamps[:-1])
            if len(decreasing):
                raise ValueError(f"timestamps decrease at row {int(decreasing[0]) + 1}; rows must be sorted by time")

    def __len__(self) -> int:
        return len(self.users)

    @property
    def num_users(self) -> int:
        """Return U, the number of users in the vocabulary, which may include users without an event."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """Return X, the number of items in the vocabulary, which may include items without an event."""
        return len(self.item_ids)

    def select(self, rows: RowArray | npt.NDArray[np.bool_] | slice) -> "Interactions":
        """Return the chosen rows (a mask, a slice, or increasing row numbers) with the same vocabularies."""
        return replace(
            self,
            users=self.users[rows],
            items=self.items[rows],
            timestamps=self.timestamps[rows],
            values=self.values[rows],
            types=self.types[rows],
            actions=None if self.actions is None else self.actions[rows],
            outcomes=None if self.outcomes is None else self.outcomes[rows],
        )

    def of_types(self, names: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return which events have one of these types, (N,)."""
        return np.array([name in names for name in self.type_names], dtype=bool)[self.types]

    def encoded(self, schema: EventSchema) -> "Interactions":
        """Return the events that encoders read. Raises: ValueError naming the types if there are none."""
        is_encoded = np.array([schema.of(name).is_encoded for name in self.type_names], dtype=bool)[self.types]
        if is_encoded.all():
            return self
        if not is_encoded.any():
            raise ValueError(
                f"none of the {len(self)} events is one that an encoder reads; types: {', '.join(self.type_names[:20])}"
                f"; allowed: at least one of a positive role in the event schema ({EVENTS_YAML})"
            )
        return self.select(is_encoded)

    def seen(self, schema: EventSchema) -> RowArray:
        """Return the rows of events whose items count as seen; exposures do not."""
        return np.flatnonzero(np.array([schema.of(name).seen for name in self.type_names], dtype=bool)[self.types])

    def speaking_for(self, schema: EventSchema) -> npt.NDArray[np.bool_]:
        """Return which events are positive, (N,): neither a rejection nor a low rating."""
        kinds, which = self._kinds()
        return np.array([schema.speaks_for(*one) for one in kinds], dtype=bool)[which]

    def speaking_against(self, schema: EventSchema) -> npt.NDArray[np.bool_]:
        """Return which events are negative, (N,)."""
        kinds, which = self._kinds()
        return np.array([schema.speaks_against(*one) for one in kinds], dtype=bool)[which]

    def _kinds(self) -> tuple[list[tuple[str, float]], RowArray]:
        """Return the distinct pairs of type and value, and each event's pair index (N,)."""
        kinds, which = np.unique(np.rec.fromarrays([self.types, self.values]), return_inverse=True)
        return [(self.type_names[kind], float(value)) for kind, value in kinds.tolist()], which

    def with_actions(self, schema: EventSchema, names: Sequence[str] | None = None) -> tuple["Interactions", list[str]]:
        """Return the events that an encoder with actions reads, with their actions, and the actions' names.

        names: by default the actions with at least MIN_EVENTS events. Raises: the errors of `encoded`.
        """
        self.encoded(schema)  # raises if there is nothing to train on
        kinds, which = self._kinds()
        if names is None:
            counts = Counter[str]()
            for (kind, value), count in zip(kinds, np.bincount(which).tolist(), strict=True):
                if kind in schema.types and schema.of(kind).history:
                    counts[action_name(schema, kind, value)] += count
            names = sorted(name for name, count in counts.items() if count >= MIN_EVENTS)
        actions = Actions(schema, names)
        rows = np.array([actions.row(*one) for one in kinds], dtype=np.int16)[which]
        return replace(self, actions=rows, outcomes=rows * ~self.speaking_for(schema)).select(rows >= 0), list(names)

    def by_user(self) -> tuple[RowArray, RowArray]:
        """Return rows (N,), offsets (U + 1,): user u's rows, oldest first, are rows[offsets[u]:offsets[u + 1]]."""
        rows = np.argsort(self.users, kind="stable").astype(np.int64)
        offsets = np.zeros(self.num_users + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.users, minlength=self.num_users), out=offsets[1:])
        return rows, offsets

    def item_counts(self) -> npt.NDArray[np.int64]:
        """Return events per item, (X,)."""
        return np.bincount(self.items, minlength=self.num_items).astype(np.int64)

    def user_counts(self) -> npt.NDArray[np.int64]:
        """Return events per user, (U,)."""
        return np.bincount(self.users, minlength=self.num_users).astype(np.int64)

    def type_counts(self) -> npt.NDArray[np.int64]:
        """Return events per type, in the order of type_names."""
        return np.bincount(self.types, minlength=len(self.type_names)).astype(np.int64)

    def keep_frequent(self, *, min_per_item: int = 1, min_per_user: int = 1) -> "Interactions":
        """Drop rare items once, then users with too few events left, and ids without events.

        `min_per_item=5` on ml-1m gives the usual version (999,611 events, 3,416 films).
        """
        kept = self.select(self.item_counts()[self.items] >= min_per_item)
        kept = kept.select(kept.user_counts()[kept.users] >= min_per_user)
        user_rows = np.flatnonzero(kept.user_counts())
        item_rows = np.flatnonzero(kept.item_counts())
        return replace(
            kept,
            users=np.searchsorted(user_rows, kept.users).astype(np.int32),
            items=np.searchsorted(item_rows, kept.items).astype(np.int32),
            user_ids=[self.user_ids[row] for row in user_rows],
            item_ids=[self.item_ids[row] for row in item_rows],
            titles=[self.titles[row] for row in item_rows],
            categories=[self.categories[row] for row in item_rows],
        )

    def fingerprint(self) -> str:
        """Return 16 hex digits of a SHA-256 over all events and vocabularies."""
        digest = hashlib.sha256()
        for column, dtype in (("users", "<i4"), ("items", "<i4"), ("timestamps", "<i8"), ("values", "<f4")):
            digest.update(np.ascontiguousarray(getattr(self, column), dtype=dtype).tobytes())
        digest.update(np.ascontiguousarray(self.types, dtype="<i2").tobytes())
        for vocabulary in (self.user_ids, self.item_ids, self.type_names):
            digest.update(("\x00".join(vocabulary) + "\x01").encode())
        return digest.hexdigest()[:16]


def order_ids(ids: Sequence[str]) -> RowArray:
    """Return the rows of `ids` in sorted order: by number if every id is a plain integer, else by code point."""
    if all(_is_plain_integer(text) for text in ids):
        return np.array(sorted(range(len(ids)), key=lambda row: int(ids[row])), dtype=np.int64)
    return np.array(sorted(range(len(ids)), key=lambda row: ids[row]), dtype=np.int64)


def from_columns(
    *,
    users: tuple[npt.NDArray[np.integer], Sequence[str]],
    items: tuple[npt.NDArray[np.integer], Sequence[str]],
    timestamps: npt.NDArray[np.integer],
    values: npt.NDArray[np.floating | np.integer] | None = None,
    types: tuple[npt.NDArray[np.integer], Sequence[str]] | None = None,
    titles: dict[str, str] | None = None,
    categories: dict[str, tuple[str, ...]] | None = None,
    name: str,
    source: str,
    has_times: bool = True,
) -> Interactions:
    """Return interactions sorted by time (ties keep their order), with vocabularies in the order of `order_ids`.

    `users`, `items`, `types`: codes (N,) and vocabulary; ids without an event are dropped. Default type: "interaction";
    default value: 1. `has_times`: see `Interactions`.
    """
    by_time = np.argsort(timestamps, kind="stable")
    user_codes, user_ids = _canonical(users[0][by_time], users[1])
    item_codes, item_ids = _canonical(items[0][by_time], items[1])
    if types is None:
        types = (np.zeros(len(timestamps), dtype=np.int16), ["interaction"])
    type_codes, type_names = _canonical(types[0][by_time], types[1])
    if values is None:
        values = np.ones(len(timestamps), dtype=np.float32)
    return Interactions(
        users=user_codes,
        items=item_codes,
        timestamps=timestamps[by_time].astype(np.int64),
        values=values[by_time].astype(np.float32),
        types=type_codes.astype(np.int16),
        user_ids=user_ids,
        item_ids=item_ids,
        type_names=type_names,
        titles=[(titles or {}).get(item_id, "") for item_id in item_ids],
        categories=[(categories or {}).get(item_id, ()) for item_id in item_ids],
        name=name,
        source=source,
        has_times=has_times,
    )


def _canonical(codes: npt.NDArray[np.integer], vocabulary: Sequence[str]) -> tuple[CodeArray, list[str]]:
    present: RowArray = np.flatnonzero(np.bincount(codes, minlength=len(vocabulary))).astype(np.int64)
    ids = [vocabulary[int(row)] for row in present]
    order = order_ids(ids)
    new_code = np.zeros(len(vocabulary), dtype=np.int32)
    new_code[present[order]] = np.arange(len(present), dtype=np.int32)
    return new_code[codes], [ids[row] for row in order]


def _is_plain_integer(text: str) -> bool:
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


def _check_codes(column: str, codes: npt.NDArray[np.integer], size: int) -> None:
    if len(codes) and (int(codes.min()) < 0 or int(codes.max()) >= size):
        raise ValueError(
            f"{column} holds codes from {int(codes.min())} to {int(codes.max())}; allowed: 0 to {size - 1}"
        )
