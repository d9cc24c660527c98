"""Encode one more event of a history at the cost of one event, not of the whole history.

Each window is compared with the previous window of the same cache key; only the events after the common prefix are
encoded (decision 014).

This module needs only NumPy. The encoder process imports it, and the export copies this file alone into the inference
server's model folder.

Letters: n events of a window, C places for cached ones, M requested states, N blocks, H heads.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
# Name of a cached array, "keys" or "values", -> (N, H, width).
Shapes = dict[str, tuple[int, int, int]]

# Places are allocated in multiples of this number. The presets' windows (100 and 200 events) are multiples, and short
# histories use little memory.
PLACES_AT_ONCE = 25
# An unused place's position is after every event of a window, so no event attends to it.
_UNUSED_POSITION = 1 << 40


@dataclass(frozen=True)
class CacheCounts:
    """Totals since the cache's creation. A hit is a sequence with at least one reused event."""

    hits: int = 0
    misses: int = 0
    events: int = 0
    reused_events: int = 0
    bytes: int = 0

    def plus(self, reused: Sequence[int], lengths: Sequence[int], *, held_bytes: int) -> "CacheCounts":
        """Add sequences. reused: number of reused events of each sequence; lengths: number of all its events."""
        hits = sum(events > 0 for events in reused)
        return CacheCounts(
            hits=self.hits + hits,
            misses=self.misses + len(reused) - hits,
            events=self.events + sum(lengths),
            reused_events=self.reused_events + sum(reused),
            bytes=held_bytes,
        )


class _Cached:
    """The events under one cache key, their attention keys and values, and the states after the last event.

    Only the first `length` of the C places are used.
    """

    def __init__(self, shapes: Shapes, places: int) -> None:
        self.length, self.places = 0, places
        self.items = np.zeros(places, dtype=np.int64)
        self.last: dict[str, FloatArray] = {}
        self.last_user = 0
        self.feeds: dict[str, npt.NDArray[Any]] = {
            "past_time": np.zeros(places, dtype=np.int64),
            "past_place": np.full(places, _UNUSED_POSITION, dtype=np.int64),
        }
        # Unused places are zero: attention multiplies masked places by zero, and zero times NaN would be NaN.
        self.arrays = {
            name: np.zeros((blocks, heads, places, width), dtype=np.float32)
            for name, (blocks, heads, width) in shapes.items()
        }
        for name, array in self.arrays.items():
            self.feeds |= {f"{name}_{block}": of_block for block, of_block in enumerate(array)}
        self.bytes = self.items.nbytes + sum(array.nbytes for array in self.feeds.values())

    def in_common(self, items: IntArray, times: IntArray) -> int:
        shorter = min(self.length, len(items))
        same = (self.items[:shorter] == items[:shorter]) & (self.feeds["past_time"][:shorter] == times[:shorter])
        return shorter if same.all() else int(same.argmin())

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.feeds["past_place"][length : self.length] = _UNUSED_POSITION
            self.length, self.last = length, {}

    def extend(self, items: IntArray, times: IntArray, new: dict[str, FloatArray]) -> None:
        start, stop = self.length, self.length + len(items)
        self.items[start:stop] = items
        self.feeds["past_time"][start:stop] = times
        self.feeds["past_place"][start:stop] = np.arange(start, stop)
        for name, array in self.arrays.items():
            array[:, :, start:stop] = new[name].reshape(*array.shape[:2], len(items), -1)
        self.length, self.last = stop, {}

    def with_room(self, shapes: Shapes, places: int) -> "_Cached":
        roomier = _Cached(shapes, places)
        roomier.extend(
            self.items[: self.length],
            self.feeds["past_time"][: self.length],
            {name: array[:, :, : self.length] for name, array in self.arrays.items()},
        )
        return roomier


class IncrementalEncoder:
    """Encodes sequences with a step graph of `offline.training.step_export` and caches them by key. Thread-safe.

    session: an ONNX Runtime session over the graph, or an equivalent object. max_bytes: limit of the cache; the least
    recently used entries are evicted first.
    """

    def __init__(self, session: Any, *, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes={max_bytes}; allowed: 0 or more")
        self._session, self._max_bytes = session, max_bytes
        shapes = {spec.name: spec.shape for spec in session.get_inputs()}
        self._takes_user = "user_index" in shapes
        self._shapes: Shapes = {
            name: (
                sum(other.startswith(f"{name}_") for other in shapes),
                shapes[f"{name}_0"][0],
                shapes[f"{name}_0"][2],
            )
            for name in ("keys", "values")
        }
        self._outputs = [spec.name for spec in session.get_outputs()]
        self._states = [name for name in self._outputs if not name.startswith("new_")]
        self._bytes_of_states = sum(
            4 * int(np.prod(spec.shape[1:])) for spec in session.get_outputs() if spec.name in self._states
        )
        self._empty_cache = _Cached(self._shapes, 1)
        self._cache: OrderedDict[int, _Cached] = OrderedDict()
        self._bytes = 0
        self._counts = CacheCounts()
        self._lock = threading.Lock()

    def encode(
        self, key: int, items: IntArray, times: IntArray, user_index: int, positions: IntArray
    ) -> tuple[dict[str, FloatArray], int]:
        """The states after the events at `positions` of a window, and the number of reused events.

        Shapes: items, times (n,), n at least 1; positions (M,), never decreasing -> components (M, P_q, d) and, for a
        mixture, gate (M, P), by name.
        """
        with self._lock:
            cached = self._cache.get(key)
            common = 0 if cached is None else cached.in_common(items, times)
            known = self._known(cached, common, user_index, positions)
            left = positions[known:]
            # A state inside the cached part, which only out-of-order events need, is encoded again from its position.
            start = min(common, int(left[0])) if len(left) else len(items)
            states: dict[str, FloatArray] = {}
            if cached is not None and start:
                self._cache.move_to_end(key)
                cached.truncate(start)
                states = {name: np.repeat(array, known, axis=0) for name, array in cached.last.items()} if known else {}
            if start < len(items):
                outputs = self._step(cached if start else None, start, items, times, user_index, left)
                self._store(key, cached if start else None, items[start:], times[start:], outputs)
                found = {name: outputs[name] for name in self._states}
                self._remember(key, len(items), positions, found, user_index)
                states = {name: np.concatenate([states[name], found[name]]) for name in found} if known else found
            self._counts = self._counts.plus([start], [len(items)], held_bytes=self._bytes)
        return states, start

    def drop(self, key: int) -> None:
        with self._lock:
            self._remove(key)
            self._counts = self._counts.plus([], [], held_bytes=self._bytes)

    def counts(self) -> CacheCounts:
        """Totals since the creation, and the cache's present bytes."""
        with self._lock:
            return self._counts

    def _known(self, cached: _Cached | None, common: int, user_index: int, positions: IntArray) -> int:
        if cached is None or not cached.last or common < cached.length or cached.last_user != user_index:
            return 0
        return int((positions == common - 1).sum()) if positions[0] == common - 1 else 0

    def _step(
        self, past: _Cached | None, start: int, items: IntArray, times: IntArray, user_index: int, positions: IntArray
    ) -> dict[str, FloatArray]:
        feeds = {
            "item_index": items[start:],
            "event_time": times[start:],
            "place": np.arange(start, len(items)),
            "position": positions - start,
            **(past or self._empty_cache).feeds,
        }
        if self._takes_user:
            feeds["user_index"] = np.array([user_index])
        return dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))

    def _store(
        self, key: int, cached: _Cached | None, items: IntArray, times: IntArray, outputs: dict[str, FloatArray]
    ) -> None:
        length = len(items) + (cached.length if cached is not None else 0)
        if cached is None or cached.places < length:
            self._remove(key)
            places = -(-length // PLACES_AT_ONCE) * PLACES_AT_ONCE
            cached = _Cached(self._shapes, places) if cached is None else cached.with_room(self._shapes, places)
            cached.bytes += self._bytes_of_states
            if cached.bytes > self._max_bytes:
                return
            self._cache[key] = cached
            self._bytes += cached.bytes
        cached.extend(items, times, {"keys": outputs["new_keys"], "values": outputs["new_values"]})
        while self._bytes > self._max_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._bytes -= oldest.bytes

    def _remember(
        self, key: int, length: int, positions: IntArray, states: dict[str, FloatArray], user_index: int
    ) -> None:
        cached = self._cache.get(key)
        if cached is not None:
            cached.last = (
                {name: array[-1:].copy() for name, array in states.items()} if positions[-1] == length - 1 else {}
            )
            cached.last_user = user_index

    def _remove(self, key: int) -> None:
        removed = self._cache.pop(key, None)
        if removed is not None:
            self._bytes -= removed.bytes
