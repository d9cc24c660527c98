"""What could keep the stack from running here, each finding with what to do about it.

Looks at the machine, the recipes, the ports, the bundle, the data, and at what runs already. Changes nothing, and
starts nothing that lasts.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from services.cli.stack.errors import StackError
from services.cli.stack.folders import cache_root
from services.cli.stack.launcher import Stack
from services.cli.stack.memory import needed_bytes
from services.cli.stack.ports import INFRASTRUCTURE, PARTS
from services.common.memory import available_bytes

Severity = Literal["ok", "warning", "error"]
_GIB = 1 << 30
_MIB = 1 << 20
_MIN_DISK_BYTES = 2 * _GIB
_DATASETS_WITHOUT_NETWORK = ("ml-1m", "ml-latest-small", "ml-100k")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: what was found, and what to do when it is not right."""

    severity: Severity
    about: str
    found: str
    advice: str = ""


def examine(stack: Stack) -> list[Finding]:
    """Every finding, the machine first. A check that itself fails is a finding too."""
    findings: list[Finding] = []
    for check in (_machine, _memory, _recipes, _ports, _bundle, _data, _running):
        try:
            findings.extend(check(stack))
        except (OSError, ValueError, StackError, psutil.Error) as exc:
            findings.append(_finding(check.__name__.strip("_"), f"could not be looked at: {exc}", "see its message"))
    return findings


def _finding(about: str, found: str, advice: str | None = None, *, otherwise: Severity = "error") -> Finding:
    """All is well without advice, else it is `otherwise`."""
    return Finding(severity=otherwise if advice else "ok", about=about, found=found, advice=advice or "")


def _machine(stack: Stack) -> Iterator[Finding]:
    right = sys.version_info[:2] == (3, 11)
    found = ".".join(str(part) for part in sys.version_info[:3])
    yield _finding("Python", found, None if right else "create the environment with make setup PYTHON=python3.11")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = None if cores >= 2 else "it runs on one core; latencies are stated for two"
    yield _finding("cores", str(cores), advice, otherwise="warning")
    for about, folder in (("disk for state", stack.place.state.root), ("disk for the cache", cache_root())):
        free = shutil.disk_usage(_existing(folder)).free
        advice = f"free at least {_MIN_DISK_BYTES / _GIB:.0f} GiB there, or set XDG_CACHE_HOME"
        found = f"{free / _GIB:.1f} GiB free at {folder}"
        yield _finding(about, found, advice if free < _MIN_DISK_BYTES else None)


def _memory(stack: Stack) -> Iterator[Finding]:
    have = available_bytes()
    if not (stack.bundle / "manifest.json").exists():
        yield _finding("memory", f"{have / _MIB:,.0f} MiB available")
        return
    to_start = [status.name for status in stack.status() if not status.running]
    need = sum(needed_bytes(stack.bundle, to_start, text=stack.place.text).values())
    found = f"{have / _MIB:,.0f} MiB available, about {need / _MIB:,.0f} MiB needed for what is not running"
    advice = "no memory for the model: end other programs, or train a smaller model"
    yield _finding("memory", found, advice if need > have else None)


def _recipes(stack: Stack) -> Iterator[Finding]:
    for name in INFRASTRUCTURE:
        found, advice = stack.components[name].missing() or ("can run here", None)
        yield _finding(f"recipe of {name}", found, advice)


def _ports(stack: Stack) -> Iterator[Finding]:
    running = {status.name for status in stack.status() if status.running}
    taken = [problem for name in PARTS if name not in running for problem in stack.ports.taken(name)]
    advice = "stop it, or start the stack elsewhere: freshet up --port-offset 1000"
    for problem in taken:
        owner = problem.owner or "a process that this user cannot see"
        yield _finding(f"port {problem.port}", f"taken by {owner}", advice)
    if not taken:
        yield _finding("ports", "free, or held by this stack")


def _bundle(stack: Stack) -> Iterator[Finding]:
    from services.algorithms.bundle import BundleError, load_bundle

    if not (stack.bundle / "manifest.json").exists():
        yield _finding("bundle", f"none at {stack.bundle}", "freshet train, or make demo")
        return
    try:
        bundle = load_bundle(stack.bundle)
    except (BundleError, OSError) as exc:
        yield _finding("bundle", str(exc), "train or export it again")
        return
    yield _finding("bundle", f"{bundle.model_version} with {bundle.num_items:,} items, checksums agree")


def _data(stack: Stack) -> Iterator[Finding]:
    from services.offline.datasets.locate import Locator

    for name in _DATASETS_WITHOUT_NETWORK:
        located = Locator(download=False).on_this_machine(name)
        if located is not None:
            yield _finding("data", f"{name} {located.where}")
            return
    advice = "it is downloaded when needed, else the simulator serves; FRESHET_DATA names a folder that has it"
    yield _finding("data", "no MovieLens set found here", advice, otherwise="warning")


def _running(stack: Stack) -> Iterator[Finding]:
    statuses = stack.status()
    if not any(status.running for status in statuses):
        yield _finding("stack", "not running")
        return
    for status in statuses:
        found = f"ready at {status.address}" if status.healthy else str(status.problem)
        advice = None if status.healthy else f"read {status.log}; freshet up starts what is missing"
        yield _finding(status.name, found, advice)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
