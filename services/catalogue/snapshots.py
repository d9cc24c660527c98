"""Snapshots of a catalogue, from which a restarted follower of `index-deltas` continues.

A snapshot is written every few minutes. It contains the offset and the mark of its newest batch's last record. It is
used only if the topic still has this record at this offset. A recreated topic has another record there. If compaction
removed the record, reading the whole topic takes about as long as continuing from the snapshot.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

log = structlog.get_logger()

C = TypeVar("C")

# Half of the brokers' default retention of tombstones (delete.retention.ms): without a tombstone, a dropped item would
# stay in the index.
MAX_AGE_S = 12 * 3600.0
SNAPSHOT_EVERY_S = 600.0


class Snapshotted(Protocol):
    """A catalogue with snapshots."""

    def capture(self, **said: int) -> Callable[[Path], Path]: ...


def started(
    make: Callable[[Any | None], C],
    root: Path,
    *,
    found: Callable[[Path], list[Path]],
    load: Callable[[Path], Any],
) -> tuple[C, Mapping[str, Any] | None]:
    """Make a catalogue from the newest intact snapshot, or from None if there is none. Return it with the snapshot's
    fields. After a ValueError, the next older snapshot is tried. found: lists snapshots, newest first. load: opens one.
    """
    for path in found(root):
        try:
            snapshot = load(path)
            details = snapshot.manifest.said
            for name, kind in (("written_s", int), ("position", int), ("mark", str)):
                if type(details.get(name)) is not kind:
                    raise ValueError(f"its manifest says {name}={details.get(name)!r:.80}; allowed: {kind.__name__}")
            catalogue = make(snapshot)
        except ValueError as exc:
            log.error("snapshot_refused", path=str(path), reason=str(exc))
            continue
        log.info("snapshot_taken", path=str(path), position=details["position"])
        return catalogue, details
    return make(None), None


class CatalogueSnapshots:
    """Writes snapshots below a folder. taken: the fields of the snapshot that the catalogue started from. writes_first:
    write one as soon as possible, so that the next start need not repeat this start's work.
    """

    def __init__(
        self,
        catalogue: Snapshotted,
        root: Path,
        *,
        taken: Mapping[str, Any] | None,
        every_s: float = SNAPSHOT_EVERY_S,
        writes_first: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalogue, self._root, self._taken = catalogue, root, taken
        self._every_s, self._clock = every_s, clock
        self._written_s, self._written_at = -math.inf if writes_first else clock(), -1
        self._thread = threading.Thread()

    def first_offset(self, is_in_place: Callable[[int, str], bool]) -> int | None:
        """Return the offset of the first record to read; None if the catalogue must be reset, because the snapshot is
        too old, or the topic no longer has the snapshot's record.
        """
        if self._taken is None or self._taken["position"] < 0:
            return 0
        position, age_s = int(self._taken["position"]), self._clock() - self._taken["written_s"]
        if age_s <= MAX_AGE_S and is_in_place(position, self._taken["mark"]):
            return position + 1
        log.info("snapshot_passed_over", root=str(self._root), position=position, age_s=round(age_s))
        return None

    def look(self, next_offset: int) -> None:
        """Start writing a snapshot if one is due and records were read since the last one, because a disconnected
        process must not write old contents with a new time. Call this while no batch is open or waiting.
        """
        is_due = self._clock() - self._written_s >= self._every_s
        if not is_due or next_offset == self._written_at or self._thread.is_alive():
            return
        self._written_s, self._written_at = self._clock(), next_offset
        write = self._catalogue.capture(written_s=round(self._written_s))
        self._thread = threading.Thread(target=self._write, args=(write,), name="snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _write(self, write: Callable[[Path], Path]) -> None:
        started = time.perf_counter()
        try:
            path = write(self._root)
        except Exception:  # the process continues, and tries again when due
            log.exception("snapshot_not_written", root=str(self._root))
            return
        log.info("snapshot_written", path=str(path), seconds=round(time.perf_counter() - started, 2))
