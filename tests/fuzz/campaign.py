"""A campaign: targets, each with its share of the inputs; what counts as a finding; the figures that are reported.

An input is named `<target>:<number>` and follows from the seed alone. Inputs of one target share a state by episodes of
some numbers (a log that grows, say), so the single input is reproduced by its episode up to it. A finding is whatever a
target raises for an input: `Violation` for a property that does not hold, any other exception as it is.
"""

import asyncio
import contextlib
import ctypes
import gc
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import psutil
import structlog

# One input may take so long on a busy machine, its share of a batch of calls included.
SLOWEST_S = 10.0
# What the process may have grown between the end of the first tenth of all inputs and the end: caches that are
# bounded fill up, and memory comes in fragments.
MAX_GROWTH_BYTES = 96 << 20
_ROUNDS = 10
_MOST_TOLD = 60


class Violation(AssertionError):
    """A property that should hold for every input does not."""


class Target(Protocol):
    """What is given inputs."""

    name: str
    # Of all inputs, in proportion to the others'.
    weight: int
    # So many inputs share a state.
    episode: int

    def opened(self, folder: Path) -> contextlib.AbstractAsyncContextManager[None]:
        """Servers and files, for a whole campaign; below an empty folder."""

    async def run(self, seed: int, numbers: Sequence[int], found: Callable[[int, BaseException], None]) -> None:
        """The inputs of one episode, in order or side by side; `found` is told of each that fails."""


def random_of(seed: int, name: str, number: int) -> Random:
    """What an input is drawn from."""
    return Random(f"{seed} {name} {number}")


@dataclass(frozen=True)
class Finding:
    """An input that failed, where, and what was said."""

    target: str
    number: int
    place: str
    text: str


class Stacks:
    """What was logged with a stack lately: the callers of an RPC are told nothing of a bug but INTERNAL."""

    def __init__(self) -> None:
        self.latest: deque[BaseException] = deque(maxlen=64)
        self.events: Counter[str] = Counter()

    def __call__(self, _: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
        self.events[event.get("event", "")] += 1
        if isinstance(event.get("exc_info"), BaseException):
            self.latest.append(event["exc_info"])
        raise structlog.DropEvent


@dataclass
class Campaign:
    """Runs `inputs` inputs over all targets, and gathers."""

    targets: Sequence[Target]
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    grown_bytes: int = 0
    stacks: Stacks = field(default_factory=Stacks)
    # Told of each finding at once.
    tell: Callable[[str], object] = lambda said: None

    async def run(self, inputs: int, folder: Path, *, minutes: float = 1e9) -> None:
        """In rounds, each with a tenth of every target's inputs; after the first one, memory is measured. No round
        begins after so many minutes."""
        async with self._opened(self.targets, folder):
            whole = sum(target.weight for target in self.targets)
            shares = {t.name: max(1, round(inputs * t.weight / whole)) for t in self.targets}
            before, until = 0, time.monotonic() + 60 * minutes
            for number in range(_ROUNDS):
                if time.monotonic() > until:
                    break
                for target in self.targets:
                    first, end = (shares[target.name] * part // _ROUNDS for part in (number, number + 1))
                    await self._some(target, first, end)
                before = before or resident_bytes()
                self.tell(f"round {number + 1} of {_ROUNDS}: {sum(self.counts.values())} inputs\n")
            self.grown_bytes = resident_bytes() - before

    async def run_one(self, name: str, number: int, folder: Path) -> None:
        """One input, after those of its episode before it."""
        (target,) = [one for one in self.targets if one.name == name]
        async with self._opened([target], folder):
            await self._some(target, number - number % target.episode, number + 1)

    @contextlib.asynccontextmanager
    async def _opened(self, targets: Sequence[Target], folder: Path) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(structlog.configure, **structlog.get_config())
            structlog.configure(processors=[self.stacks])
            for target in targets:
                own = folder / target.name
                own.mkdir(parents=True)
                await stack.enter_async_context(target.opened(own))
            yield

    async def _some(self, target: Target, first: int, end: int) -> None:
        began = time.perf_counter()
        start = first
        while start < end:
            stop = min(end, start - start % target.episode + target.episode)
            # An episode that a round has cut begins again, because its state was given up.
            numbers = range(start, stop)
            async with asyncio.timeout(SLOWEST_S * len(numbers)):
                await target.run(self.seed, numbers, lambda number, exc: self._found(target.name, number, exc))
            self.counts[target.name] += len(numbers)
            start = stop
        self.seconds[target.name] += time.perf_counter() - began

    def _found(self, name: str, number: int, exc: BaseException) -> None:
        exc = self._cause(exc)
        frames = traceback.extract_tb(exc.__traceback__)
        ours = [frame for frame in frames if "/services/" in frame.filename] or frames
        where = f"{ours[-1].filename.rpartition('/services/')[2]}:{ours[-1].lineno}" if ours else ""
        said = f"{exc}" if isinstance(exc, Violation) else f"{type(exc).__name__}"
        place = f"{said[:160]} {where}".strip()
        self.findings.append(Finding(name, number, place, "".join(traceback.format_exception(exc))[-4000:]))
        self.tell(f"{name}:{number} {place}\n")

    def _cause(self, exc: BaseException) -> BaseException:
        """Of an RPC that failed for a bug, what the server logged."""
        if isinstance(exc, Violation) and "INTERNAL" in str(exc) and self.stacks.latest:
            return self.stacks.latest.pop()
        return exc

    def report(self) -> dict[str, Any]:
        """For the last line."""
        return {
            "seed": self.seed,
            "inputs": sum(self.counts.values()),
            "seconds": round(sum(self.seconds.values()), 1),
            "grown_mib": round(self.grown_bytes / 2**20, 1),
            "by_target": {
                name: {"inputs": count, "seconds": round(self.seconds[name], 1)} for name, count in self.counts.items()
            },
            "findings": len(self.findings),
        }

    def said(self) -> str:
        """The findings, alike ones once, with the command that gives one of them again."""
        alike: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            alike.setdefault((finding.target, finding.place), []).append(finding)
        return "\n".join(
            f"{len(some)} x {target}: {place}\n    --seed {self.seed} --only {target}:{some[0].number}\n{some[0].text}"
            for (target, place), some in list(alike.items())[:_MOST_TOLD]
        )


def resident_bytes() -> int:
    """What the process holds, after everything was given back that can be."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
