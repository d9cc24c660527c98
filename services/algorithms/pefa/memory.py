"""The interactions that PEFA-XL remembers: of the survivors (those not removed), the ones with the smallest hashes of
ids (decision 013).

A reserve besides the `capacity` visible entries replaces removed ones. When it is used up, survivors are missing:
`wants_refill` is true, and the caller must `refill`. Until then the memory has exactly the survivors with a hash below
a bound.

Letters: P_q query components, d component width.
"""

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Half = npt.NDArray[np.float16]
Arrays = dict[str, npt.NDArray[np.generic]]

_NO_BOUND = 2**64  # above every hash
_OBJECT_BYTES = 800  # an entry's Python objects and table entries; measured: 770


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryEntry:
    """One remembered interaction, immutable under its id.

    components (P_q, d): the query state before the interaction.
    """

    entry_id: str
    item_id: str
    components: Half
    weight: float
    interaction_type: str
    event_seconds: int

    def __post_init__(self) -> None:
        if self.components.ndim != 2 or self.components.dtype != np.float16:
            raise ValueError(
                f"components has shape {self.components.shape} of {self.components.dtype}; expected (P_q, d) of float16"
            )
        if not np.isfinite(self.components).all():
            raise ValueError(f"entry {self.entry_id!r}: components holds NaN or infinite values")
        if not np.isfinite(self.weight):
            raise ValueError(f"entry {self.entry_id!r}: weight={self.weight}; allowed: finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChanges:
    """Net changes of visible entries since the last `take_changes`."""

    entered: tuple[MemoryEntry, ...] = ()
    left: tuple[str, ...] = ()


class QueryMemory:
    """One model's entries, at most `capacity` visible. Not safe for concurrent writers."""

    def __init__(self, *, capacity: int, num_components: int, width: int, reserve: int | None = None) -> None:
        """Make an empty memory. reserve: number of invisible entries, by default an eighth of `capacity`; may be 0."""
        for name, value in (("capacity", capacity), ("num_components", num_components), ("width", width)):
            if value < 1:
                raise ValueError(f"{name}={value} allowed: at least 1")
        self.capacity = capacity
        self.reserve = capacity // 8 if reserve is None else reserve
        if self.reserve < 0:
            raise ValueError(f"reserve={reserve} allowed: 0 or more")
        self.num_components, self.width = num_components, width
        self._entries: dict[str, MemoryEntry] = {}
        self._order: list[tuple[int, str]] = []
        self._bound = _NO_BOUND
        # State of changed entries at the last `take_changes`, None if not visible.
        self._changed: dict[str, MemoryEntry | None] = {}

    def __len__(self) -> int:
        return min(len(self._order), self.capacity)

    def __contains__(self, entry_id: object) -> bool:
        """Whether an entry is here, also if invisible."""
        return entry_id in self._entries

    def __iter__(self) -> Iterator[MemoryEntry]:
        return (self._entries[entry_id] for _, entry_id in self._order[: self.capacity])

    @property
    def wants_refill(self) -> bool:
        """Whether survivors may be missing: some were rejected, and fewer than `capacity` are left."""
        return self._bound < _NO_BOUND and len(self._order) < self.capacity

    @property
    def bytes_per_entry(self) -> int:
        return 2 * self.num_components * self.width + _OBJECT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, with the reserve."""
        return len(self._order) * self.bytes_per_entry

    def admits(self, entry_id: str) -> bool:
        """Whether `add` would store this entry. Ask before building an entry, since most are rejected.

        Like in `add`, a rejection for lack of room lowers the bound.
        """
        if entry_id in self._entries:
            return False
        pair = (hash_of(entry_id), entry_id)
        if pair[0] >= self._bound:
            return False
        if len(self._order) >= self.capacity + self.reserve and pair > self._order[-1]:
            self._end_at(pair[0])
            return False
        return True

    def add(self, entries: Iterable[MemoryEntry]) -> None:
        """Offer entries; those already here are ignored.

        Raises: ValueError with the entry of another shape; the entries before it are added.
        """
        for entry in entries:
            if entry.components.shape != (self.num_components, self.width):
                raise ValueError(
                    f"entry {entry.entry_id!r} has components {entry.components.shape}; "
                    f"this memory holds {(self.num_components, self.width)}"
                )
            if entry.entry_id in self._entries:
                continue
            pair = (hash_of(entry.entry_id), entry.entry_id)
            if pair[0] >= self._bound:
                continue
            position = bisect.bisect_left(self._order, pair)
            self._order.insert(position, pair)
            self._entries[entry.entry_id] = entry
            if position < self.capacity:
                self._note(entry.entry_id, None)
                if len(self._order) > self.capacity:
                    hidden = self._order[self.capacity][1]
                    self._note(hidden, self._entries[hidden])
            if len(self._order) > self.capacity + self.reserve:
                self._end_at(self._order[-1][0])

    def remove(self, entry_ids: Iterable[str]) -> None:
        """Remove entries. Unknown ids are ignored, since most entries were never admitted."""
        for entry_id in entry_ids:
            if entry_id in self._entries:
                self._take_out(bisect.bisect_left(self._order, (hash_of(entry_id), entry_id)))

    def refill(self, entries: Iterable[MemoryEntry]) -> None:
        """Offer all survivors that are not here, also those rejected before. If `entries` fails, nothing changes.

        Raises: as `add`.
        """
        before, self._bound = self._bound, _NO_BOUND
        try:
            self.add(entries)
        except BaseException:
            self._end_at(before)  # entries below were here before; this removes those offered now
            raise

    def take_changes(self) -> MemoryChanges:
        """Entries that became visible or invisible since the last call."""
        visible = self._order[: self.capacity]
        edge = visible[-1] if visible else (-1, "")
        entered, left = [], []
        for entry_id, before in sorted(self._changed.items()):
            now = self._entries.get(entry_id)
            if now is not None and (hash_of(entry_id), entry_id) > edge:
                now = None
            if now is not None and before is None:
                entered.append(now)
            elif now is None and before is not None:
                left.append(entry_id)
        self._changed.clear()
        return MemoryChanges(entered=tuple(entered), left=tuple(left))

    def digest(self) -> str:
        """32 hex digits of the visible entries: equal survivors have equal digests (unless `wants_refill`)."""
        digest = hashlib.blake2b(repr((self.capacity, self.num_components, self.width)).encode(), digest_size=16)
        for entry in self:
            for text in (entry.entry_id, entry.item_id, entry.interaction_type):
                encoded = text.encode()
                digest.update(len(encoded).to_bytes(4, "little") + encoded)
            digest.update(np.ascontiguousarray(entry.components, dtype="<f2").data)
            digest.update(np.array([entry.weight], dtype="<f8").tobytes())
            digest.update(entry.event_seconds.to_bytes(8, "little", signed=True))
        return digest.hexdigest()

    def held(self) -> list[tuple[int, MemoryEntry]]:
        """All entries with hashes, also of the reserve, in order of hashes."""
        return [(number, self._entries[entry_id]) for number, entry_id in self._order]

    @property
    def bound(self) -> int | None:
        """All survivors with a hash below this are here; None means all survivors."""
        return self._bound if self._bound < _NO_BOUND else None

    @classmethod
    def restored(
        cls,
        entries: Iterable[MemoryEntry],
        *,
        capacity: int,
        reserve: int,
        num_components: int,
        width: int,
        bound: int | None,
    ) -> "QueryMemory":
        """A memory with these entries and no changes. Raises: ValueError for an entry of another shape."""
        out = cls(capacity=capacity, reserve=reserve, num_components=num_components, width=width)
        out.add(entries)
        out._bound = _NO_BOUND if bound is None else bound
        out._changed.clear()
        return out

    def _end_at(self, bound: int) -> None:
        """Remove all entries from hash `bound` on, so that equal hashes are removed together."""
        self._bound = bound
        while self._order and self._order[-1][0] >= bound:
            self._take_out(len(self._order) - 1)

    def _take_out(self, position: int) -> None:
        entry_id = self._order.pop(position)[1]
        if position < self.capacity:
            self._note(entry_id, self._entries[entry_id])
            if len(self._order) >= self.capacity:
                self._note(self._order[self.capacity - 1][1], None)
        del self._entries[entry_id]

    def _note(self, entry_id: str, before: MemoryEntry | None) -> None:
        self._changed.setdefault(entry_id, before)


def arrays_of(entries: Sequence[MemoryEntry], num_components: int, width: int) -> Arrays:
    texts = [text.encode() for entry in entries for text in (entry.entry_id, entry.item_id, entry.interaction_type)]
    shape = (len(entries), num_components, width)
    components = np.stack([entry.components for entry in entries]) if entries else np.empty(shape, np.float16)
    return {
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
        "text_ends": np.cumsum([len(text) for text in texts], dtype=np.int64),
        "components": components,
        "weights": np.array([entry.weight for entry in entries], dtype=np.float64),
        "event_seconds": np.array([entry.event_seconds for entry in entries], dtype=np.int64),
    }


def entries_of_arrays(arrays: Mapping[str, npt.NDArray[np.generic]]) -> list[MemoryEntry]:
    """The inverse of `arrays_of`. Raises: ValueError for arrays that do not fit each other."""
    components = np.asarray(arrays["components"], dtype=np.float16)
    weights, seconds = arrays["weights"].tolist(), arrays["event_seconds"].tolist()
    ends = [0, *arrays["text_ends"].tolist()]
    text = arrays["text"].tobytes()
    num = len(weights)
    if components.ndim != 3 or {len(components), len(seconds)} != {num} or len(ends) != 3 * num + 1:
        raise ValueError(
            f"components has shape {components.shape}, with {num} weights, {len(seconds)} times and "
            f"{len(ends) - 1} texts; expected (n, P_q, d), n, n and 3 n"
        )
    if ends[-1] != len(text):
        raise ValueError(f"text holds {len(text)} bytes; text_ends says {ends[-1]}")
    texts = [text[start:end].decode() for start, end in itertools.pairwise(ends)]
    return [
        MemoryEntry(
            entry_id=texts[3 * row],
            item_id=texts[3 * row + 1],
            interaction_type=texts[3 * row + 2],
            components=components[row],
            weight=float(weights[row]),
            event_seconds=int(seconds[row]),
        )
        for row in range(num)
    ]


def hash_of(entry_id: str) -> int:
    """64 bits of an entry id's BLAKE2b, equal in every process."""
    return int.from_bytes(hashlib.blake2b(entry_id.encode(), digest_size=8).digest(), "big")
