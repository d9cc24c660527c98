"""The operating system's figures of the local stack's processes: read from outside, so that it costs them nothing."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def processes(state: Path) -> dict[str, int]:
    """Return process ids of the local stack in a state folder, by name. Raises: ValueError if there is none."""
    found = {}
    for path in sorted((state / "run").glob("*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(about.get("pid"), int):
            found[path.stem] = about["pid"]
    if not found:
        raise ValueError(f"--state={state} names no running stack")
    return found


def _family(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        for thread in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, thread.read_text(encoding="ascii").split())
    return found


def resident(pid: int) -> int:
    """Return resident bytes of a process and its descendants; 0 if it ended."""
    pages = 0
    for member in _family(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{member}/statm").read_text(encoding="ascii").split()[1])
    return pages * _PAGE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Since a process started: processor time of it and its descendants (s), and the number of voluntary waits of their
    threads.
    """

    processor_s: float = 0.0
    waits: int = 0


def use(pid: int) -> Use:
    """Return the use of a process; zeros if it ended."""
    family = [_own_use(member) for member in _family(pid)]
    return Use(processor_s=sum(one.processor_s for one in family), waits=sum(one.waits for one in family))


def _own_use(pid: int) -> Use:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        waits = 0
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for line in (thread / "status").read_text(encoding="ascii").splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    waits += int(line.split()[1])
    except OSError:
        return Use()
    return Use(processor_s=sum(map(int, fields[11:15])) * _TICK_S, waits=waits)


def loopback_bytes() -> int:
    """Return the bytes over the loopback device since the machine started."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    return 0


def uses(pids: Mapping[str, int]) -> dict[str, Use]:
    """Return each process's use, by name."""
    return {name: use(pid) for name, pid in pids.items()}
