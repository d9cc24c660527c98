"""Feedback for text search from clicks on results: exact sums per item (PEFA-XS) and remembered queries (PEFA-XL).

A click's query state moves the item's state towards it, and votes for the item when a later query is similar.
Clicks arrive in any order and repeatedly; they may be undone or forgotten before or after they arrive. The result is
bit-identical to one from the surviving clicks alone. Removing a click encodes its query again, so `encode` must depend
on the text alone, not on padding in a batch.

Letters: P_x item components, d component width, n requested items.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.contribution import Contributions, FixedPoint, cold_start_items
from services.algorithms.pefa.memory import MemoryChanges, MemoryEntry, QueryMemory, hash_of
from services.algorithms.pefa.policy import SharePolicy
from services.algorithms.pefa.refresh import refreshed
from services.algorithms.pefa.sums import ItemSums, SumsOf
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate, QueryStates

# (partition, offset) of the interaction: it identifies a click.
SourcePosition = tuple[int, int]
# A query's components (P_q, d) in float32; None for a text without a known word.
Encode = Callable[[str], FloatArray | None]
# `ItemSums.add` or `ItemSums.remove`.
AddOrRemove = Callable[[Sequence[str], FixedPoint, npt.NDArray[np.float64]], None]

CLICK = "search_click"
_CLICK_BYTES = 580  # bytes of a click with texts of 30 bytes, and its table entries; measured: 574
_CACHED_QUERIES = 4_096
_CLICKS_AT_ONCE = 1_024  # clicks whose contributions are computed together


@dataclass(frozen=True, slots=True)
class Click:
    """One click; `user` is a pseudonym."""

    source_position: SourcePosition
    query: str
    item_id: str
    user: str
    event_seconds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackChanges:
    """Changes since the last `take_changes`: items with changed sums, and remembered queries that were added or
    removed.
    """

    item_ids: tuple[str, ...]
    memory: MemoryChanges


class QueryFeedback:
    """All clicks of one text model. Not safe for concurrent writers."""

    def __init__(
        self,
        encode: Encode,
        *,
        states: ItemStates,
        index: Mapping[str, int],
        pair_gate: PairGate | None,
        num_query_components: int,
        capacity: int,
    ) -> None:
        """Start without clicks. states (X, P_x, d): the model's item states; index: their rows by item id. Other items
        start from zero. capacity: number of queries that may vote; their source positions have the smallest hashes.

        Raises: ValueError for states with a gate, which a text model lacks, or a capacity below 1.
        """
        if states.gate is not None:
            raise ValueError(f"states.gate has shape {states.gate.shape}; allowed: None, a text model gates by cosines")
        _, num_components, width = states.components.shape
        self._encode, self._states, self._index = encode, states, index
        self._contributions = Contributions(pair_gate)
        self._sums = ItemSums(num_components=num_components, width=width)
        self._shape = (num_query_components, width)
        self._memory = QueryMemory(capacity=capacity, num_components=num_query_components, width=width)
        self._clicks: dict[SourcePosition, Click] = {}
        self._by_user: dict[str, set[SourcePosition]] = {}
        self._undone: set[SourcePosition] = set()
        self._forgotten: dict[str, dict[int, int]] = {}
        self._changed: dict[str, None] = {}
        self._cached: OrderedDict[str, FloatArray | None] = OrderedDict()
        self._sum_of_click_hashes = 0

    def __len__(self) -> int:
        return len(self._clicks)

    @property
    def nbytes(self) -> int:
        return _CLICK_BYTES * len(self._clicks) + self._sums.nbytes + self._memory.nbytes

    def add(self, clicks: Iterable[Click]) -> None:
        """Count clicks; clicks already counted, undone or forgotten are ignored.

        Raises: ValueError for a query state of another shape than the model's.
        """
        new: dict[SourcePosition, Click] = {}
        for click in clicks:
            known = self._clicks.get(click.source_position)
            # A click that was counted under another pseudonym of the user moves to the new one.
            if (known is None or known.user != click.user) and not self._is_void(click):
                new[click.source_position] = click
        self._take_out(new.keys() & self._clicks.keys())
        arriving = list(new.values())
        for start in range(0, len(arriving), _CLICKS_AT_ONCE):
            # Encode before any change, so that an encoding error leaves no partial click.
            here = self._with_states(arriving[start : start + _CLICKS_AT_ONCE])
            for click, _ in here:
                self._clicks[click.source_position] = click
                self._by_user.setdefault(click.user, set()).add(click.source_position)
                self._sum_of_click_hashes += _hash(click)
            self._fold(here, self._sums.add)
            self._memory.add(
                _entry(click, state)
                for click, state in here
                if state is not None and self._memory.admits(_entry_id(click.source_position))
            )

    def undo(self, positions: Iterable[SourcePosition]) -> None:
        """Remove the clicks at these positions, and ignore those that arrive later."""
        wanted = set(positions)
        self._undone |= wanted
        self._take_out(wanted & self._clicks.keys())

    def forget(self, user: str, up_to: Mapping[int, int]) -> None:
        """Remove a user's clicks up to these offsets, by partition, and ignore those that arrive later."""
        known = self._forgotten.setdefault(user, {})
        for partition, offset in up_to.items():
            known[partition] = max(offset, known.get(partition, -1))
        self._take_out({at for at in self._by_user.get(user, ()) if at[1] <= up_to.get(at[0], -1)})

    def take_changes(self) -> FeedbackChanges:
        self._refill()  # first, because it can fail
        changed, self._changed = tuple(sorted(self._changed)), {}
        return FeedbackChanges(item_ids=changed, memory=self._memory.take_changes())

    def sums_of(self, item_ids: Sequence[str]) -> SumsOf:
        """The sums of these items (n,), known or not."""
        return self._sums.of(item_ids)

    def states_of(self, item_ids: Sequence[str], *, share: SharePolicy, new_share: SharePolicy) -> ItemStates:
        """Refreshed states (n, P_x, d): `share` for items of the model, `new_share` for others.

        Without clicks they are the model's, or zero. Source: arXiv:2312.02429, equation 8.
        """
        sums = self._sums.of(item_ids)
        known = np.array([item_id in self._index for item_id in item_ids], dtype=bool)
        shares = [policy.model_share(sums.evidence, sums.coherence) for policy in (share, new_share)]
        return refreshed(self._rows(item_ids), sums.sums, np.where(known, *shares))

    def digest(self) -> str:
        """A hash (32 hex digits) of clicks, sums and visible memory; equal surviving clicks give equal ones."""
        digest = hashlib.blake2b((self._sum_of_click_hashes % (1 << 128)).to_bytes(16, "little"), digest_size=16)
        digest.update(self._sums.digest().encode())
        self._refill()
        digest.update(self._memory.digest().encode())
        return digest.hexdigest()

    def _is_void(self, click: Click) -> bool:
        partition, offset = click.source_position
        return click.source_position in self._undone or offset <= self._forgotten.get(click.user, {}).get(partition, -1)

    def _take_out(self, positions: set[SourcePosition]) -> None:
        for start in range(0, len(leaving := sorted(positions)), _CLICKS_AT_ONCE):
            gone = self._with_states([self._clicks[position] for position in leaving[start : start + _CLICKS_AT_ONCE]])
            for click, _ in gone:
                del self._clicks[click.source_position]
                of_user = self._by_user[click.user]
                of_user.discard(click.source_position)
                if not of_user:
                    del self._by_user[click.user]
                self._sum_of_click_hashes -= _hash(click)
            self._fold(gone, self._sums.remove)
            self._memory.remove(_entry_id(click.source_position) for click, _ in gone)

    def _fold(self, clicks: Sequence[tuple[Click, FloatArray | None]], into: AddOrRemove) -> None:
        here = [(click, state) for click, state in clicks if state is not None]
        if not here:
            return
        item_ids = [click.item_id for click, _ in here]
        weights = np.ones(len(here))
        queries = QueryStates(components=np.stack([state for _, state in here]))
        given = self._contributions(queries, weights, self._rows(item_ids))
        into(item_ids, given, weights)
        self._changed.update(dict.fromkeys(item_ids))

    def _refill(self) -> None:
        if self._memory.wants_refill:
            self._memory.refill(self._missing())

    def _missing(self) -> Iterator[MemoryEntry]:
        """The surviving clicks that the memory lacks, by hash, until it rejects one; only these are encoded."""
        for click in sorted(self._clicks.values(), key=lambda click: hash_of(_entry_id(click.source_position))):
            entry_id = _entry_id(click.source_position)
            state = None if entry_id in self._memory else self._state(click.query)
            if state is None:
                continue
            if not self._memory.admits(entry_id):  # the memory notes the rejection
                return
            yield _entry(click, state)

    def _with_states(self, clicks: Sequence[Click]) -> list[tuple[Click, FloatArray | None]]:
        return [(click, self._state(click.query)) for click in clicks]

    def _state(self, query: str) -> FloatArray | None:
        if query in self._cached:
            self._cached.move_to_end(query)
            return self._cached[query]
        state = self._encode(query)
        if state is not None:
            if state.shape != self._shape:
                raise ValueError(f"a query's components have shape {state.shape}; the model's have {self._shape}")
            state = np.asarray(state.astype(np.float16).astype(np.float32))
        self._cached[query] = state
        if len(self._cached) > _CACHED_QUERIES:
            self._cached.popitem(last=False)
        return state

    def _rows(self, item_ids: Sequence[str]) -> ItemStates:
        _, num_components, width = self._states.components.shape
        found = cold_start_items(len(item_ids), num_components=num_components, width=width, mean_gate=None)
        rows = np.array([self._index.get(item_id, -1) for item_id in item_ids], dtype=np.int64)
        found.components[rows >= 0] = self._states.components[rows[rows >= 0]]
        return found


def _entry(click: Click, state: FloatArray) -> MemoryEntry:
    return MemoryEntry(
        entry_id=_entry_id(click.source_position),
        item_id=click.item_id,
        components=state.astype(np.float16),
        weight=1.0,
        interaction_type=CLICK,
        event_seconds=click.event_seconds,
    )


def _entry_id(position: SourcePosition) -> str:
    return f"{position[0]}:{position[1]}"


def _hash(click: Click) -> int:
    text = "\0".join(
        (_entry_id(click.source_position), click.user, click.item_id, click.query, str(click.event_seconds))
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
