"""Looks for users of whom the state store lost something, a slice at a time, and has them brought back."""

import time
from collections.abc import Callable, Collection, Iterator

from services.user_state.ports import Store
from services.user_state.restore_users import RestoreUsers
from services.user_state.stream_progress import StreamProgress
from services.user_state.values import StoreUsage

# Of a turn, for looking for lost users.
_LOOK_S = 0.05


class LostUsers:
    """`find` begins to look, `turn` goes on with it. restore: None: over a store that loses nobody."""

    def __init__(
        self, store: Store, progress: StreamProgress, restore: RestoreUsers | None, clock_ms: Callable[[], int]
    ) -> None:
        self._store, self._progress, self.restore, self._clock_ms = store, progress, restore, clock_ms
        # Of the partitions that were applied when the progress was taken last.
        self._partitions: Collection[int] = ()
        # The look that goes on, when it began, when the next may begin, and how many keys the store had taken away
        # when the last one did.
        self._looking: Iterator[Collection[str]] | None = None
        self._began_ms = self._next_ms = 0
        self._removed = -1

    def resynced(self, *, is_new_epoch: bool) -> None:
        """The progress was taken from the store again: other partitions, or another store, begin anew."""
        has_others = self._partitions != set(self._progress.watermarks)
        self._partitions = set(self._progress.watermarks)
        if self.restore is not None and has_others:
            self.restore.look_again()
        if self.restore is not None and is_new_epoch:
            self.restore.clear()
        if has_others or is_new_epoch or self._looking is not None:
            self._looking, self._removed = None, -1

    def find(self, *, look: bool) -> StoreUsage:
        """How full the store is; begins to look where it says that it took keys away since the last time. look: where
        it does not, too (a key that somebody deleted is not counted). Raises: DependencyUnavailable."""
        usage = self._store.usage()
        if self.restore is None or self._looking is not None or self._clock_ms() < self._next_ms:
            return usage
        if usage.removed != self._removed or look:
            self._looking = self._store.find_lost(self._progress.watermarks.keys(), self._progress.epoch)
            self._removed, self._began_ms = usage.removed, self._clock_ms()
        return usage

    @property
    def is_busy(self) -> bool:
        """Whether `turn` has something to do at once."""
        return self.restore is not None and (self._looking is not None or self.restore.is_busy)

    def turn(self) -> int:
        """A slice of the look, and of bringing users back; how much was done. Raises: as `RestoreUsers.turn`."""
        if self.restore is None:
            return 0
        return self._look(self.restore) + self.restore.turn(self._progress.watermarks, self._progress.epoch)

    def _look(self, restore: RestoreUsers) -> int:
        """How many it looked for, at least one while it goes on."""
        if self._looking is None:
            return 0
        until, num_lost = time.monotonic() + _LOOK_S, 0
        for found in self._looking:
            restore.add(found)
            num_lost += len(found)
            if time.monotonic() > until:
                return max(1, num_lost)
        self._looking = None
        # A full store takes keys away all the time: the next look rests for as long as this one took.
        self._next_ms = 2 * self._clock_ms() - self._began_ms
        return num_lost
