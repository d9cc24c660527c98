"""Checkpoints in a folder, read only, as `freshet restore` writes them: `partition-3.checkpoint`.

A refresher reads them after the topic's (`checkpoint_topic.py`).
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from services.platform.errors import DependencyUnavailable
from services.refresher.checkpoint import from_file
from services.refresher.ports import StoredCheckpoint


class CheckpointFiles:
    """Reads `root`, which may be absent."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def load(self, partition: int) -> Iterator[StoredCheckpoint]:
        path = self._root / f"partition-{partition}.checkpoint"
        if path.exists():
            yield StoredCheckpoint(str(path), partial(_read, path), is_base=False)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise DependencyUnavailable(f"{path} cannot be read: {exc}") from exc
    return from_file(data)
