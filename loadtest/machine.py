"""The operating system's figures of the local stack's processes. Reading them costs those processes nothing."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


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


def resident(pid: int) -> int:
    """Return resident bytes of a process and its descendants; 0 if it ended."""
    nbytes = 0
    for member in _family(pid):
        with suppress(psutil.Error):
            nbytes += member.memory_info().rss
    return nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Since a process started: processor time of it and its descendants (s), and the number of voluntary waits of their
    threads.
    """

    processor_s: float = 0.0
    waits: int = 0


def use(pid: int) -> Use:
    """Return the use of a process; zeros if it ended."""
    processor_s, waits = 0.0, 0
    for member in _family(pid):
        with suppress(psutil.Error, OSError):
            times = member.cpu_times()
            processor_s += times.user + times.system + times.children_user + times.children_system
            for status in Path(f"/proc/{member.pid}/task").glob("*/status"):
                waits += int(status.read_text(encoding="ascii").partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return Use(processor_s=processor_s, waits=waits)


def _family(pid: int) -> list[psutil.Process]:
    # psutil's `children` reads all processes of the machine: three times the processor time with 130 of them.
    found, waiting = [], [pid]
    for member in waiting:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(member))
        for thread in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                waiting += map(int, thread.read_text(encoding="ascii").split())
    return found


def loopback_bytes() -> int:
    """Return the bytes over the loopback device since the machine started."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def uses(pids: Mapping[str, int]) -> dict[str, Use]:
    """Return each process's use, by name."""
    return {name: use(pid) for name, pid in pids.items()}
