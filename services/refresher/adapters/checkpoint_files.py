"""The checkpoint port over a folder: one file per partition, and the one before it, replaced by renaming.

`partition-3.checkpoint` is the newest, `partition-3.older` the one before. Whatever moment a crash takes, one of them
is whole. Several refreshers share the folder; an older file than the newest possible only costs some folding again.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import DependencyUnavailable


class CheckpointFiles:
    """The folder `root`, made when first written to."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, partition: int, data: bytes) -> None:
        """Write aside, flush to disk, rename into place; the file before becomes the older one.

        Raises: DependencyUnavailable when the folder cannot be written.
        """
        newest, older = self._newest(partition), self._older(partition)
        # A name of its own: whoever lost the partition and does not know it yet may write at the same time.
        aside = self._root / f".partition-{partition}.{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with aside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                newest.replace(older)
            aside.replace(newest)
            self._sync_folder()
            self._sweep(partition)
        except OSError as exc:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise DependencyUnavailable(f"the checkpoint of partition {partition} cannot be written: {exc}") from exc

    def load(self, partition: int) -> Iterator[tuple[str, bytes]]:
        """What was saved, newest first, with a name for messages; whether it is whole is for the reader to tell."""
        for path in (self._newest(partition), self._older(partition)):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise DependencyUnavailable(f"{path} cannot be read: {exc}") from exc
            yield str(path), data

    def _newest(self, partition: int) -> Path:
        return self._root / f"partition-{partition}.checkpoint"

    def _older(self, partition: int) -> Path:
        return self._root / f"partition-{partition}.older"

    def _sync_folder(self) -> None:
        folder = os.open(self._root, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sweep(self, partition: int) -> None:
        """Remove what writers that were killed left aside, once it is clearly nobody's."""
        newest_s = self._newest(partition).stat().st_mtime
        for left in self._root.glob(f".partition-{partition}.*"):
            with contextlib.suppress(FileNotFoundError):
                if left.stat().st_mtime < newest_s - 60:
                    left.unlink()
