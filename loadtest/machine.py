"""What the operating system says of the local stack's processes: from outside, so that it costs them nothing."""

import json
import os
from contextlib import suppress
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def processes(state: Path) -> dict[str, int]:
    """Process ids of the local stack in a state folder, by name. Raises: ValueError where there is none."""
    found = {}
    for path in sorted((state / "run").glob("*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(about.get("pid"), int):
            found[path.stem] = about["pid"]
    if not found:
        raise ValueError(f"--state={state} names no running stack")
    return found


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for member in found:
        for thread in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, thread.read_text(encoding="ascii").split())
    return found


def resident(pid: int) -> int:
    """Bytes, of its descendants too; of a process that ended, 0."""
    pages = 0
    for member in _family(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{member}/statm").read_text(encoding="ascii").split()[1])
    return pages * _PAGE_BYTES
