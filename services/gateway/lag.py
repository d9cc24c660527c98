"""How far the applied stream lags behind what this gateway got acknowledged.

Knows only its own acknowledgements: what other producers wrote directly to the stream shows in nobody's lag here.
"""

import time
from collections import deque
from collections.abc import Callable

from services.common.stream.position import Position

# Marks per partition: one per `_SPACING_S`, so this many cover a grace of several seconds with room.
_MAX_MARKS = 64
_SPACING_S = 0.2


class AcknowledgedLag:
    """Remembers, per partition, which offset was acknowledged when."""

    def __init__(self, *, grace_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._marks: dict[int, deque[tuple[int, float]]] = {}

    def acknowledged(self, position: Position) -> None:
        """This position is durable since now."""
        marks = self._marks.setdefault(position.partition, deque())
        now = self._clock()
        if marks and position.offset <= marks[-1][0]:
            return
        if marks and now - marks[-1][1] < _SPACING_S:
            # One mark for all of this moment, so that the last events of a burst are not forgotten.
            marks[-1] = (position.offset, marks[-1][1])
            return
        # Full: the oldest marks say how long it lags, so the newest one is left out.
        if len(marks) < _MAX_MARKS:
            marks.append((position.offset, now))

    def behind(self, partition: int, watermark: int | None) -> bool:
        """True when something acknowledged longer ago than the grace is not applied yet."""
        marks = self._marks.get(partition)
        if not marks:
            return False
        applied = -1 if watermark is None else watermark
        while marks and marks[0][0] <= applied:
            marks.popleft()
        return bool(marks) and self._clock() - marks[0][1] > self._grace_seconds
