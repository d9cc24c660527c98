"""Checkpoints in a folder, read only: what `freshet restore` put there.

`partition-3.checkpoint` is the newest, `partition-3.older` the one before. New checkpoints go to a topic
(`checkpoint_topic.py`), which comes first.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from services.common.errors import DependencyUnavailable
from services.refresher.checkpoint import from_file
from services.refresher.ports import Kept


class CheckpointFiles:
    """The folder `root`, which may be absent."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def load(self, partition: int) -> Iterator[Kept]:
        """What is there, newest first."""
        for name in (f"partition-{partition}.checkpoint", f"partition-{partition}.older"):
            path = self._root / name
            if path.exists():
                yield Kept(str(path), partial(_read, path), is_base=False)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise DependencyUnavailable(f"{path} cannot be read: {exc}") from exc
    return from_file(data)
