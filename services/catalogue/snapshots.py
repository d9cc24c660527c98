"""Snapshots of a catalogue on this machine, so that a late follower of `index-deltas` reads on from there.

One is written every few minutes beside the serving; it names the batch that it reflects. It is taken only where the
topic still has that batch's last record in its place: a topic made anew has another one there, and where compaction
took it, so much was written since that reading all of it takes about as long. It knows nothing of indexes.
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

# Half of what brokers keep a tombstone by default (delete.retention.ms): after a longer absence one may be gone, and
# what it dropped would stay.
MAX_AGE_S = 12 * 3600.0


class Snapshotted(Protocol):
    """The catalogue, as snapshots see it."""

    def capture(self, **said: int) -> Callable[[Path], Path]: ...


def _check_said(said: Mapping[str, Any]) -> None:
    """Raises: ValueError unless a snapshot says when it was written, and of which record."""
    for name, kind in (("written_s", int), ("position", int), ("mark", str)):
        if type(said.get(name)) is not kind:
            raise ValueError(f"its manifest says {name}={said.get(name)!r:.80}; allowed: {kind.__name__}")


def started(
    make: Callable[[Any | None], C],
    root: Path,
    *,
    found: Callable[[Path], list[Path]],
    load: Callable[[Path], Any],
) -> tuple[C, Mapping[str, Any] | None]:
    """What `make` makes of the newest snapshot that is whole, or of None; and what that one says.

    `found` lists them, newest first; `load` opens one. What `load` and `make` refuse is a ValueError that says what and
    where: then the one before is tried.
    """
    for path in found(root):
        try:
            snapshot = load(path)
            said = snapshot.manifest.said
            _check_said(said)
            catalogue = make(snapshot)
        except ValueError as exc:
            log.error("snapshot_refused", path=str(path), reason=str(exc))
            continue
        log.info("snapshot_taken", path=str(path), position=said["position"])
        return catalogue, said
    return make(None), None


class CatalogueSnapshots:
    """Those below a folder, of a catalogue that started from one, which says `taken`, or from None.

    writes_first: one is written as soon as it may be, which spares the next start what this one had to do.
    """

    def __init__(
        self,
        catalogue: Snapshotted,
        root: Path,
        *,
        taken: Mapping[str, Any] | None,
        every_s: float,
        writes_first: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalogue, self._root, self._taken = catalogue, root, taken
        self._every_s, self._clock = every_s, clock
        self._written_s, self._written_at = -math.inf if writes_first else clock(), -1
        self._thread = threading.Thread()

    def first_offset(self, is_in_place: Callable[[int, str], bool]) -> int | None:
        """The first record that the catalogue lacks; None where what it started from is too old, or the topic another
        one: then it has to go back to the bundle's states."""
        if self._taken is None or self._taken["position"] < 0:
            return 0
        position, age_s = int(self._taken["position"]), self._clock() - self._taken["written_s"]
        if age_s <= MAX_AGE_S and is_in_place(position, self._taken["mark"]):
            return position + 1
        log.info("snapshot_passed_over", root=str(self._root), position=position, age_s=round(age_s))
        return None

    def look(self, next_offset: int) -> None:
        """Begin to write one when it is time and something was read since: cut off, a process keeps its last one's age.

        For a moment at which no batch is open and none waits.
        """
        is_due = self._clock() - self._written_s >= self._every_s
        if not is_due or next_offset == self._written_at or self._thread.is_alive():
            return
        self._written_s, self._written_at = self._clock(), next_offset
        write = self._catalogue.capture(written_s=round(self._written_s))
        self._thread = threading.Thread(target=self._write, args=(write,), name="snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for one that is being written."""
        if self._thread.is_alive():
            self._thread.join()

    def _write(self, write: Callable[[Path], Path]) -> None:
        started = time.perf_counter()
        try:
            path = write(self._root)
        except Exception:  # the process serves on without, and tries again when it is time
            log.exception("snapshot_not_written", root=str(self._root))
            return
        log.info("snapshot_written", path=str(path), seconds=round(time.perf_counter() - started, 2))
