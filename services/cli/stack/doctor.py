"""What could keep the stack from running here, each finding with what to do about it.

Looks at the machine, the recipes, the ports, the bundle, the data, and at what runs already. Changes nothing, and
starts nothing that lasts.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from services.cli.stack.errors import StackError
from services.cli.stack.folders import cache_root
from services.cli.stack.launcher import Stack
from services.cli.stack.memory import needed_bytes
from services.cli.stack.parts import INFRASTRUCTURE, PARTS
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
    for check in _CHECKS:
        try:
            findings.extend(check(stack))
        except (OSError, ValueError, StackError, psutil.Error) as exc:
            about = check.__name__.strip("_")
            findings.append(Finding(severity="error", about=about, found=f"could not be looked at: {exc}"))
    return findings


def _python(stack: Stack) -> Iterator[Finding]:
    found = ".".join(str(part) for part in sys.version_info[:3])
    right = sys.version_info[:2] == (3, 11)
    advice = "" if right else "create the environment with Python 3.11: make setup PYTHON=python3.11"
    yield Finding(severity="ok" if right else "error", about="Python", found=found, advice=advice)


def _machine(stack: Stack) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        severity="ok" if cores >= 2 else "warning",
        about="cores",
        found=str(cores),
        advice="" if cores >= 2 else "it runs on one core; latencies are stated for two",
    )
    for about, folder in (("disk for state", stack.place.state.root), ("disk for the cache", cache_root())):
        free = shutil.disk_usage(_existing(folder)).free
        enough = free >= _MIN_DISK_BYTES
        yield Finding(
            severity="ok" if enough else "error",
            about=about,
            found=f"{free / _GIB:.1f} GiB free at {folder}",
            advice="" if enough else f"free at least {_MIN_DISK_BYTES / _GIB:.0f} GiB there, or set XDG_CACHE_HOME",
        )


def _memory(stack: Stack) -> Iterator[Finding]:
    have = available_bytes()
    to_start = [status.name for status in stack.status() if not status.running]
    if not (stack.bundle / "manifest.json").exists():
        yield Finding(severity="ok", about="memory", found=f"{have / _MIB:,.0f} MiB available")
        return
    need = sum(needed_bytes(stack.bundle, to_start, text=stack.place.text).values())
    fits = need <= have
    yield Finding(
        severity="ok" if fits else "error",
        about="memory",
        found=f"{have / _MIB:,.0f} MiB available, about {need / _MIB:,.0f} MiB needed for what is not running",
        advice="" if fits else "no memory for the model: end other programs, or train a smaller model",
    )


def _recipes(stack: Stack) -> Iterator[Finding]:
    for name in INFRASTRUCTURE:
        problem = stack.components[name].missing()
        yield Finding(
            severity="ok" if problem is None else "error",
            about=f"recipe of {name}",
            found="can run here" if problem is None else problem[0],
            advice="" if problem is None else problem[1],
        )


def _ports(stack: Stack) -> Iterator[Finding]:
    running = {status.name for status in stack.status() if status.running}
    taken = [problem for name in PARTS if name not in running for problem in stack.ports.taken(name)]
    for problem in taken:
        yield Finding(
            severity="error",
            about=f"port {problem.port}",
            found=f"taken by {problem.owner or 'a process that this user cannot see'}",
            advice="stop it, or start the stack elsewhere: freshet up --port-offset 1000",
        )
    if not taken:
        yield Finding(severity="ok", about="ports", found="free, or held by this stack")


def _bundle(stack: Stack) -> Iterator[Finding]:
    from services.algorithms.bundle import BundleError, load_bundle

    if not (stack.bundle / "manifest.json").exists():
        yield Finding(
            severity="error", about="bundle", found=f"none at {stack.bundle}", advice="freshet train, or make demo"
        )
        return
    try:
        bundle = load_bundle(stack.bundle)
    except (BundleError, OSError) as exc:
        yield Finding(severity="error", about="bundle", found=str(exc), advice="train or export it again")
        return
    yield Finding(
        severity="ok", about="bundle", found=f"{bundle.model_version} with {bundle.num_items:,} items, checksums agree"
    )


def _data(stack: Stack) -> Iterator[Finding]:
    from services.offline.datasets.locate import Locator

    located = None
    for name in _DATASETS_WITHOUT_NETWORK:
        located = Locator(download=False).on_this_machine(name)
        if located is not None:
            yield Finding(severity="ok", about="data", found=f"{name} {located.where}")
            return
    yield Finding(
        severity="warning",
        about="data",
        found="no MovieLens set found here",
        advice="it is downloaded when needed, else the simulator serves; FRESHET_DATA names a folder that has it",
    )


def _running(stack: Stack) -> Iterator[Finding]:
    statuses = stack.status()
    if not any(status.running for status in statuses):
        yield Finding(severity="ok", about="stack", found="not running")
        return
    for status in statuses:
        yield Finding(
            severity="ok" if status.healthy else "error",
            about=status.name,
            found=f"ready at {status.address}" if status.healthy else str(status.problem),
            advice="" if status.healthy else f"read {status.log}; freshet up starts what is missing",
        )


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


_CHECKS: tuple[Callable[[Stack], Iterator[Finding]], ...] = (
    _python,
    _machine,
    _memory,
    _recipes,
    _ports,
    _bundle,
    _data,
    _running,
)
