"""Find users whose keys the state store lost, in slices, and restore them."""

import time
from collections.abc import Callable, Collection, Iterator

from services.user_state.ports import Store
from services.user_state.restore_users import RestoreUsers
from services.user_state.stream_progress import StreamProgress
from services.user_state.values import StoreUsage

# Seconds of a turn for finding lost users.
_LOOK_S = 0.05


class LostUsers:
    """`find` begins a scan, `turn` continues it. restore: None if the store cannot lose users."""

    def __init__(
        self, store: Store, progress: StreamProgress, restore: RestoreUsers | None, clock_ms: Callable[[], int]
    ) -> None:
        self._store, self._progress, self.restore, self._clock_ms = store, progress, restore, clock_ms
        # The partitions when the progress was last read.
        self._partitions: Collection[int] = ()
        # The present scan, its start, the earliest next start, and the store's count of removed keys at the last start.
        self._looking: Iterator[Collection[str]] | None = None
        self._began_ms = self._next_ms = 0
        self._removed = -1

    def resynced(self, *, is_new_epoch: bool) -> None:
        """Call it after reading the store's progress; a scan stops.

        The next `find` begins a new one if one was running, the partitions changed, or the epoch is new.
        """
        has_others = self._partitions != set(self._progress.watermarks)
        self._partitions = set(self._progress.watermarks)
        if self.restore is not None and has_others:
            self.restore.look_again()
        if self.restore is not None and is_new_epoch:
            self.restore.clear()
        if has_others or is_new_epoch or self._looking is not None:
            self._looking, self._removed = None, -1

    def find(self, *, look: bool) -> StoreUsage:
        """The store's usage. Begin a scan if the store removed keys since the last began.

        None begins during another or in the pause after it. look: begin one even if no keys were removed, since the
        store does not count those that a client deleted. Raises: DependencyUnavailable.
        """
        usage = self._store.usage()
        if self.restore is None or self._looking is not None or self._clock_ms() < self._next_ms:
            return usage
        if usage.removed != self._removed or look:
            self._looking = self._store.find_lost(self._progress.watermarks.keys(), self._progress.epoch)
            self._removed, self._began_ms = usage.removed, self._clock_ms()
        return usage

    @property
    def is_busy(self) -> bool:
        """Whether `turn` has work to do."""
        return self.restore is not None and (self._looking is not None or self.restore.is_busy)

    def turn(self) -> int:
        """Scan and restore a slice; return the work done. Raises: as `RestoreUsers.turn`."""
        if self.restore is None:
            return 0
        return self._look(self.restore) + self.restore.turn(self._progress.watermarks, self._progress.epoch)

    def _look(self, restore: RestoreUsers) -> int:
        """The number of lost users found, at least 1 while the scan continues."""
        if self._looking is None:
            return 0
        until, num_lost = time.monotonic() + _LOOK_S, 0
        for found in self._looking:
            restore.add(found)
            num_lost += len(found)
            if time.monotonic() > until:
                return max(1, num_lost)
        self._looking = None
        # A full store removes keys all the time, so the pause is as long as the scan.
        self._next_ms = 2 * self._clock_ms() - self._began_ms
        return num_lost
