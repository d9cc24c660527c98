"""How far the applied stream lags behind this gateway's acknowledged writes; other producers are not counted."""

import time
from collections import deque
from collections.abc import Callable

from services.platform.stream.records import Position

# Per partition, one per `_SPACING_S`: they cover a grace of several seconds.
_MAX_MARKS = 64
_SPACING_S = 0.2
# If an event acknowledged earlier is not applied, answers are marked as not fresh.
GRACE_S = 2.0
# Shares of the grace after which reads, and later writes, yield to applying events; seconds within which a watermark
# must have moved for that.
_READS_STAND_BACK, _WRITES_STAND_BACK, _MOVES_S = 0.25, 0.5, 1.0


class AcknowledgedLag:
    """Records, per partition, which offset was acknowledged when."""

    def __init__(self, *, grace_seconds: float = GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._marks: dict[int, deque[tuple[int, float]]] = {}
        # Per partition: the highest watermark found, and when.
        self._applied: dict[int, tuple[int, float]] = {}

    def acknowledged(self, position: Position) -> None:
        """Record that this position is durable now."""
        marks = self._marks.setdefault(position.partition, deque())
        now = self._clock()
        if marks and position.offset <= marks[-1][0]:
            return
        if marks and now - marks[-1][1] < _SPACING_S:
            # A burst's events share a mark with the last one's offset.
            marks[-1] = (position.offset, marks[-1][1])
            return
        # The oldest marks measure the lag, so the newest is left out.
        if len(marks) < _MAX_MARKS:
            marks.append((position.offset, now))

    def behind(self, partition: int, watermark: int | None) -> bool:
        """An event acknowledged longer ago than the grace is not applied yet."""
        return self._behind_s(partition, watermark) > self._grace_seconds

    def reads_yield(self, partition: int, watermark: int | None) -> bool:
        """Record the watermark; True if answers are about to be `behind` while events are applied."""
        applied = -1 if watermark is None else watermark
        if applied > self._applied.get(partition, (-1, 0.0))[0]:
            self._applied[partition] = applied, self._clock()
        return self._hurries(partition, _READS_STAND_BACK)

    def writes_yield(self, partition: int) -> bool:
        """As `reads_yield`, at a larger lag, by the recorded watermark."""
        return self._hurries(partition, _WRITES_STAND_BACK)

    def _hurries(self, partition: int, share: float) -> bool:
        if partition not in self._applied:
            return False
        watermark, since = self._applied[partition]
        moves = self._clock() - since < _MOVES_S
        return moves and self._behind_s(partition, watermark) > share * self._grace_seconds

    def _behind_s(self, partition: int, watermark: int | None) -> float:
        """Seconds for which an acknowledged event is not applied."""
        marks = self._marks.get(partition)
        if not marks:
            return 0.0
        applied = -1 if watermark is None else watermark
        while marks and marks[0][0] <= applied:
            marks.popleft()
        return self._clock() - marks[0][1] if marks else 0.0
