"""Encode one more event of a history for the price of one step, not of the history.

A caller sends the whole window each time. What was sent last under the same key is compared with it, event by event;
keys and values of the part in common are taken from memory and only the rest is encoded. So correctness never rests on
somebody remembering to invalidate: an insertion out of order, an undo, a slide of the window, a forgotten user or two
users of one key merely have less in common. Memory is bounded by bytes; the least recently used go first.

It runs an ONNX step graph through the session handed to it, and needs NumPy alone: the encoder process imports it, and
the export puts a copy into the inference server's model folder, where nothing else of ours can be imported.

Letters: n events of a window, S of them encoded now, C places for kept ones, M states wanted, H heads, d_qk, d_v.
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

# Places are made so many at once: the presets' windows of 100 and 200 fill them whole, and short histories stay small.
PLACES_AT_ONCE = 25


@dataclass(frozen=True)
class CacheCounts:
    """What a cache was asked for since it was made, and what it holds now.

    A hit is a sequence of which at least one event was not encoded anew.
    """

    hits: int = 0
    misses: int = 0
    events: int = 0
    reused_events: int = 0
    bytes: int = 0

    def plus(self, reused: Sequence[int], lengths: Sequence[int], *, held_bytes: int) -> "CacheCounts":
        """After some more sequences: of each, the events not encoded anew, and its length."""
        hits = sum(events > 0 for events in reused)
        return CacheCounts(
            hits=self.hits + hits,
            misses=self.misses + len(reused) - hits,
            events=self.events + sum(lengths),
            reused_events=self.reused_events + sum(reused),
            bytes=held_bytes,
        )


class _Kept:
    """The events under one key, and their keys and values per block; `length` of the C places are in use."""

    def __init__(self, shapes: dict[str, tuple[int, int]], places: int) -> None:
        self.length, self.places = 0, places
        self.items = np.zeros(places, dtype=np.int64)
        self.times = np.zeros((1, places), dtype=np.int64)
        # Zeros, not whatever memory holds: places not in use are multiplied by zero, and a NaN would survive that.
        self.arrays = {name: np.zeros(_shape(name, *shapes[name], places), dtype=np.float32) for name in shapes}
        self.bytes = self.items.nbytes + self.times.nbytes + sum(array.nbytes for array in self.arrays.values())

    def in_common(self, items: IntArray, times: IntArray) -> int:
        """How many events, from the first on, are the same."""
        shorter = min(self.length, len(items))
        same = (self.items[:shorter] == items[:shorter]) & (self.times[0, :shorter] == times[:shorter])
        return shorter if same.all() else int(same.argmin())

    def take(self, start: int, items: IntArray, times: IntArray, new: dict[str, FloatArray]) -> None:
        """Go on with these events from place `start` on; items and times are the whole window's."""
        self.length = len(items)
        self.items[start : self.length] = items[start:]
        self.times[0, start : self.length] = times[start:]
        for name, array in new.items():
            _places(name, self.arrays[name], start, self.length)[...] = array

    def moved_to(self, other: "_Kept", length: int) -> None:
        """Copy the first `length` places to one with more of them."""
        other.items[:length] = self.items[:length]
        other.times[:, :length] = self.times[:, :length]
        for name, array in self.arrays.items():
            _places(name, other.arrays[name], 0, length)[...] = _places(name, array, 0, length)


class IncrementalEncoder:
    """Sequences under keys, encoded by a step graph as `services.training.step_export` makes it. Thread-safe.

    `session` is an ONNX Runtime session over the graph (or anything with its get_inputs, get_outputs and run);
    `max_bytes` bounds what is kept. One model only: another model's keys and values are another encoder's.
    """

    def __init__(self, session: Any, *, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes={max_bytes}; allowed: 0 or more")
        self._session, self._max_bytes = session, max_bytes
        shapes = {spec.name: spec.shape for spec in session.get_inputs()}
        self._takes_user = "user_index" in shapes
        # Per kept array: heads and width, its axes besides batch and places.
        self._shapes = {
            name: (shape[1], shape[2] if name.startswith("keys") else shape[3])
            for name, shape in shapes.items()
            if name.startswith(("keys_", "values_"))
        }
        self._outputs = [spec.name for spec in session.get_outputs()]
        self._nothing = _Kept(self._shapes, 1)
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._bytes = 0
        self._counts = CacheCounts()
        self._lock = threading.Lock()

    def encode(
        self, key: int, items: IntArray, times: IntArray, user_index: int, positions: IntArray
    ) -> tuple[dict[str, FloatArray], int]:
        """The states after the events at `positions` of a window, and how many events were not encoded anew.

        Shapes: items, times (n,), n at least 1; positions (M,) -> components (M, P_q, d) and, for a mixture,
        gate (M, P), by name.
        """
        with self._lock:
            kept = self._kept.get(key)
            start = 0
            if kept is not None:
                # A state of an event that is kept is had by encoding that event again: one more in the same step.
                start = min(kept.in_common(items, times), int(positions.min()))
            outputs = self._step(kept if kept is not None and start else self._nothing, start, items, times,
                                 user_index, positions)  # fmt: skip
            new = {name: outputs.pop(f"new_{name}") for name in self._shapes}
            self._keep(key, kept, start, items, times, new)
            self._counts = self._counts.plus([start], [len(items)], held_bytes=self._bytes)
        return {name: array[0] for name, array in outputs.items()}, start

    def drop(self, key: int) -> None:
        """Forget what is kept under a key."""
        with self._lock:
            self._remove(key)
            self._counts = self._counts.plus([], [], held_bytes=self._bytes)

    def counts(self) -> CacheCounts:
        """Since the beginning, and now."""
        with self._lock:
            return self._counts

    def _step(
        self, past: _Kept, start: int, items: IntArray, times: IntArray, user_index: int, positions: IntArray
    ) -> dict[str, FloatArray]:
        feeds: dict[str, npt.NDArray[Any]] = {
            "item_index": np.ascontiguousarray(items[None, start:]),
            "event_time": np.ascontiguousarray(times[None, start:]),
            "position": np.ascontiguousarray(positions[None] - start),
            "past_length": np.array([start], dtype=np.int64),
            "past_time": past.times,
            **past.arrays,
        }
        if self._takes_user:
            feeds["user_index"] = np.array([user_index], dtype=np.int64)
        return dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))

    def _keep(
        self, key: int, kept: _Kept | None, start: int, items: IntArray, times: IntArray, new: dict[str, FloatArray]
    ) -> None:
        if kept is None or kept.places < len(items):
            roomier = _Kept(self._shapes, -(-len(items) // PLACES_AT_ONCE) * PLACES_AT_ONCE)
            if kept is not None:
                kept.moved_to(roomier, start)
                self._remove(key)
            if roomier.bytes > self._max_bytes:
                return
            kept = self._kept[key] = roomier
            self._bytes += kept.bytes
        self._kept.move_to_end(key)
        kept.take(start, items, times, new)
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.bytes

    def _remove(self, key: int) -> None:
        removed = self._kept.pop(key, None)
        if removed is not None:
            self._bytes -= removed.bytes


def _shape(name: str, heads: int, width: int, places: int) -> tuple[int, int, int, int]:
    return (1, heads, width, places) if name.startswith("keys") else (1, heads, places, width)


def _places(name: str, array: FloatArray, start: int, stop: int) -> FloatArray:
    return array[..., start:stop] if name.startswith("keys") else array[:, :, start:stop]
