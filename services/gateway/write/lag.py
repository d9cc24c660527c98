"""How far the applied stream lags behind what this gateway got acknowledged.

Knows only its own acknowledgements: what other producers wrote directly to the stream shows in nobody's lag here.
"""

import time
from collections import deque
from collections.abc import Callable

from services.platform.stream.position import Position

# Marks per partition: one per `_SPACING_S`, so this many cover a grace of several seconds with room.
_MAX_MARKS = 64
_SPACING_S = 0.2
# What was acknowledged longer ago and is not applied makes answers marked as not fresh.
GRACE_S = 2.0
# Of the grace: from then on who applies events needs the machine more than who asks, and then more than who brings new
# ones. It does while it moves.
_READS_STAND_BACK, _WRITES_STAND_BACK, _MOVES_S = 0.25, 0.5, 1.0


class AcknowledgedLag:
    """Remembers, per partition, which offset was acknowledged when."""

    def __init__(self, *, grace_seconds: float = GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._marks: dict[int, deque[tuple[int, float]]] = {}
        # Per partition: the newest watermark that a read saw, and since when.
        self._applied: dict[int, tuple[int, float]] = {}

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
        return self._behind_s(partition, watermark) > self._grace_seconds

    def reads_stand_back(self, partition: int, watermark: int | None) -> bool:
        """True when answers are about to be `behind`, and events are being applied."""
        applied = -1 if watermark is None else watermark
        if applied > self._applied.get(partition, (-1, 0.0))[0]:
            self._applied[partition] = applied, self._clock()
        return self._hurries(partition, _READS_STAND_BACK)

    def writes_stand_back(self, partition: int) -> bool:
        """The same, later, by the watermark that reads saw; without reads never."""
        return self._hurries(partition, _WRITES_STAND_BACK)

    def _hurries(self, partition: int, share: float) -> bool:
        if partition not in self._applied:
            return False
        watermark, since = self._applied[partition]
        moves = self._clock() - since < _MOVES_S
        return moves and self._behind_s(partition, watermark) > share * self._grace_seconds

    def _behind_s(self, partition: int, watermark: int | None) -> float:
        """Since when something acknowledged is not applied, in seconds; 0: all is."""
        marks = self._marks.get(partition)
        if not marks:
            return 0.0
        applied = -1 if watermark is None else watermark
        while marks and marks[0][0] <= applied:
            marks.popleft()
        return self._clock() - marks[0][1] if marks else 0.0
