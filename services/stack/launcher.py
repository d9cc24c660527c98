"""`Stack`: start the parts in docker-compose.yml's order, wait until they are healthy, stop them.

The state folder records parts, ports and bundle for later `Stack` objects, until `down`. Parts are detached processes.
"""

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from services.platform.config import environment_tls
from services.stack.children import Children
from services.stack.components.component import Component, Place, Say
from services.stack.components.console import Console
from services.stack.components.inference_server import InferenceServer
from services.stack.components.kafka import Kafka
from services.stack.components.process import Process
from services.stack.components.redis import Redis
from services.stack.compose import Profile, compact, read_compose, sharded
from services.stack.errors import StackError, tail
from services.stack.folders import DEFAULT_STATE, StateFolder
from services.stack.held_ports import held_for_servers
from services.stack.memory import require_encoder, require_stack_memory
from services.stack.note import (
    Note,
    bundle_file,
    counts,
    new_shards,
    note_file,
    port_advice,
    shard_addresses,
    taken_over,
)
from services.stack.ports import CONSOLE, LOOPBACK, PARTS, Ports, stop_order
from services.stack.probes import silence

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PartStatus:
    """A part's status. `problem` is None if the part is running and ready."""

    name: str
    running: bool
    problem: str | None
    pid: int | None = None
    address: str = ""
    memory_mb: float = 0.0
    uptime_s: float = 0.0
    log: str = ""

    @property
    def healthy(self) -> bool:
        return self.running and self.problem is None


class Stack:
    """A local stack in a state folder."""

    def __init__(
        self,
        state: Path | str = DEFAULT_STATE,
        *,
        bundle: Path | str | None = None,
        text: Path | str | None = None,
        ports: Ports | None = None,
        profile: Profile | None = None,
        workers: int | None = None,
        shards: int | None = None,
        replicas: int = 1,
        settings: Mapping[str, str] | None = None,
        console: bool | None = None,
        say: Say | None = None,
    ) -> None:
        """Open a stack. A parameter that is None has the recorded value, or else the default.

        The default `bundle` is the one of the last `replace_bundle`, or `<state>/bundle`; the default `text` is
        `<state>/text`, which may be absent. `ports` are by default the documented ones, `profile` is "split", and
        `workers`, the gateway processes of a compact stack, is 1. Each of several `shards` has `replicas` stacks
        (`shard_stacks`). `settings` are added to docker-compose.yml's. `console` tells whether the console is a part.
        `say(part, doing)` reports progress.
        """
        folder = StateFolder(Path(state).resolve())
        noted = Note.read(folder)
        self.place = Place(
            state=folder,
            ports=ports or noted.ports or Ports.default(),
            bundle=Path(bundle or noted.bundle or taken_over(folder) or folder.root / "bundle").resolve(),
            text=Path(text or noted.text or folder.root / "text").resolve(),
            settings=settings or {},
        )
        self._say: Say = say or (lambda part, doing: None)
        self._children = Children(folder.run)
        self.profile: Profile = profile or noted.profile or "split"
        self.workers = workers or noted.workers
        if self.workers > 1 and self.profile != "compact":
            raise ValueError(f"workers={self.workers} allowed: 1, or the profile compact")
        self.shards = noted.shards
        if shards is not None and (shards, replicas) != counts(noted.shards):
            self.shards = new_shards(shards, replicas)
        if self.shards and self.profile == "compact":
            raise ValueError(f"shards={len(self.shards)} allowed: 1, or the profile split")
        services = read_compose()
        if self.profile == "compact":
            services = compact(services, self.workers)
        if self.shards:
            services = sharded(services, shard_addresses(self.shards))
        if not (noted.console if console is None else console):
            del services[CONSOLE]
        kinds: dict[str, type[Component]] = {"kafka": Kafka, "redis": Redis, "inference-server": InferenceServer}
        kinds[CONSOLE] = Console
        self.components = {name: kinds.get(name, Process)(services[name]) for name in PARTS if name in services}

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts, in display order."""
        return tuple(self.components)

    @property
    def ports(self) -> Ports:
        return self.place.ports

    @property
    def bundle(self) -> Path:
        return self.place.bundle

    def address(self, part: str) -> str:
        """Return a part's host:port (inference server: gRPC)."""
        return self.ports.address(part)

    @property
    def console_address(self) -> str:
        """The console's address, or "" if the console is not running."""
        runs = CONSOLE in self._running()
        return f"http{'' if environment_tls() is None else 's'}://{self.address(CONSOLE)}" if runs else ""

    @property
    def redis_url(self) -> str:
        return f"redis://{self.address('redis')}/0"

    @property
    def kafka_bootstrap(self) -> str:
        return self.address("kafka")

    def log(self, part: str) -> Path:
        return self.place.state.log(part)

    def shard_stacks(self) -> Iterator[tuple[str, "Stack"]]:
        """Yield name and stack, in `STATE/shards`, of each shard's replicas. Only their part `candidates` runs."""
        for number, replicas in enumerate(self.shards):
            for place, ports in enumerate(replicas):
                name = f"{number}-of-{len(self.shards)}-replica-{place}"
                yield (
                    name,
                    Stack(
                        self.place.state.root / "shards" / name,
                        bundle=self.bundle,
                        text=self.place.text,
                        ports=Ports({**self.ports.numbers, **ports}),
                        profile="split",
                        settings={"FRESHET_CANDIDATES_SHARD": f"{number}/{len(self.shards)}"},
                        say=self._say,
                    ),
                )

    def up_shards(self, *, timeout_s: float = 120.0) -> None:
        """Start all replicas. It raises what `up` raises."""
        up_together([one for _, one in self.shard_stacks()], ["candidates"], timeout_s=timeout_s)

    def use_bundle(self, bundle: Path | str) -> None:
        """Use another bundle for later starts."""
        self.place = replace(self.place, bundle=Path(bundle).resolve())

    def replace_bundle(self, bundle: Path | str, parts: Iterable[str]) -> None:
        """Restart these parts with another bundle, one after the other; others use it from their next start.

        It stays the stack's bundle after `down`.
        """
        self.use_bundle(bundle)
        with self.place.state.locked():
            bundle_file(self.place.state).write_text(str(self.bundle), encoding="utf-8")
            self._note().write(self.place.state)
        for name in parts:
            if name not in self.components:
                for _, one in self.shard_stacks():
                    one.replace_bundle(self.bundle, [name])
                continue
            self.stop(name)
            # The part may have many changes to read.
            self.start(name, timeout_s=600.0)

    def prepare(self, only: Iterable[str] | None = None) -> None:
        """Fetch and build requirements (jars, environments)."""
        for name in self._known(only):
            self.components[name].prepare(self._say)

    def up(self, only: Iterable[str] | None = None, *, timeout_s: float = 120.0) -> None:
        """Start the stopped parts of `only` (default all) and wait until all are healthy.

        Raises: StackError with the part, if it cannot be prepared, its port is taken, memory does not suffice, it
        ended, or was not healthy in time. Started parts continue to run.
        """
        wanted = self._known(only)
        with self.place.state.locked():
            self.place.state.make()
            to_start = [name for name in wanted if self._children.find(name) is None]
            if any(PARTS[name].needs_bundle for name in to_start):
                self._require_bundle(to_start)
            self.prepare(wanted)
            Note.read(self.place.state).require_same(self._note(), self._running())
            self._require_ports(to_start)
            self._note().write(self.place.state)
            ports = [number for name in to_start for number in self.ports.of(name).values()]
            with held_for_servers(LOOPBACK, ports):
                self._start_in_order(wanted, to_start, timeout_s)

    def start(self, name: str, *, wait: bool = True, timeout_s: float = 60.0) -> None:
        """Start one part; with `wait` return when it is healthy."""
        (name,) = self._known([name])
        with self.place.state.locked():
            self.place.state.make()
            self.components[name].prepare(self._say)
            self._require_ports([name])
            self._spawn(name)
        if wait:
            self.wait_healthy(name, timeout_s=timeout_s)
        self._lower_priority(name)

    def stop(self, name: str, *, timeout_s: float | None = None) -> None:
        """Send SIGTERM, wait, and send SIGKILL if the part does not end in time."""
        self._stop_together([name], timeout_s)

    def kill(self, name: str) -> None:
        """Send SIGKILL to the part and its children."""
        self._children.signal(name, signal.SIGKILL)
        self._children.wait_gone(name, 5.0)

    def down(self) -> list[str]:
        """Stop everything in order; return what was stopped."""
        with self.place.state.locked():
            stopped = self._running()
            for names in stop_order():
                self._stop_together(names, None)
            note_file(self.place.state).unlink(missing_ok=True)
        return stopped

    def status(self) -> list[PartStatus]:
        """Return every part's status, probed with its own protocol."""
        return [self._status(name) for name in self.parts]

    def versions(self) -> dict[str, str]:
        """Return the running parts' versions."""
        return {name: self.components[name].version(self.place) for name in self._running()}

    def problem(self, name: str) -> str | None:
        """Return why the part is not ready, or None if it is ready."""
        if self._children.find(name) is None:
            return "not running"
        return silence(self.address(name)) or self.components[name].probe(self.place)

    def wait_healthy(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Wait until the part is ready. Raises: StackError if it ends or takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = self._children.find(name) is not None
            problem = self.problem(name)
            if problem is None:
                return
            if not running:
                raise self._failed(name, "ended while starting")
            if time.monotonic() > deadline:
                raise self._failed(name, f"not ready after {timeout_s:.0f} s: {problem}")
            time.sleep(_POLL_S)

    def _start_in_order(self, wanted: Collection[str], to_start: Collection[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        waiting = [name for name in wanted if name in to_start]
        began: dict[str, float] = {name: time.monotonic() for name in wanted if name not in to_start}
        healthy: set[str] = set()
        reasons: dict[str, str] = {}
        while len(healthy) < len(wanted):
            # Kafka comes last, because formatting its folder would delay the other parts.
            for name in sorted(waiting, key=lambda name: name == "kafka"):
                needs = self.components[name].service.needs
                if all(other in (healthy if must else began) for other, must in needs.items() if other in wanted):
                    waiting.remove(name)
                    self._say(name, "starting")
                    began[name] = time.monotonic()
                    self._spawn(name)
            for name in began.keys() - healthy:
                problem = self.problem(name)
                if problem is None:
                    healthy.add(name)
                    self._lower_priority(name)
                    self._say(name, f"ready after {time.monotonic() - began[name]:.1f} s")
                elif self._children.find(name) is None:
                    raise self._failed(name, "ended while starting")
                else:
                    reasons[name] = problem
            if time.monotonic() > deadline:
                name = next(name for name in wanted if name not in healthy)
                why = reasons.get(name, "the parts that it needs were not ready")
                raise self._failed(name, f"not ready after {timeout_s:.0f} s: {why}")
            time.sleep(_POLL_S)

    def _lower_priority(self, name: str) -> None:
        """Lower a started part's priority. With an eighth of the CPU weight, a start took 47 s instead of 17."""
        self._children.lower_priority(name, self.components[name].service.cpu_shares)

    def _spawn(self, name: str) -> None:
        self._children.spawn(name, self.components[name].launch(self.place), self.log(name))

    def _failed(self, name: str, how: str) -> StackError:
        return StackError(name, f"{how}; the end of {self.log(name)}:\n{tail(self.log(name))}")

    def _known(self, names: Iterable[str] | None) -> list[str]:
        asked = set(self.parts if names is None else names)
        unknown = asked - set(self.parts)
        if unknown:
            raise ValueError(f"part={sorted(unknown)[0]!r}; allowed: {', '.join(self.parts)}")
        return [name for name in self.parts if name in asked]

    def _note(self) -> Note:
        return Note(
            ports=self.ports,
            bundle=str(self.bundle),
            text=str(self.place.text),
            profile=self.profile,
            workers=self.workers,
            shards=self.shards,
            console=CONSOLE in self.components,
        )

    def _running(self) -> list[str]:
        return [name for name in self.parts if self._children.find(name) is not None]

    def _require_ports(self, names: Iterable[str]) -> None:
        for name in names:
            taken = next(self.ports.taken(name), None)
            if taken is not None:
                raise StackError(name, str(taken), advice=port_advice(taken, self.place.state.root, "up"))

    def _require_bundle(self, names: Collection[str]) -> None:
        if not (self.bundle / "manifest.json").exists():
            raise StackError(
                "bundle", f"no model bundle at {self.bundle}", advice="freshet train, or make demo, makes one"
            )
        require_encoder(self.bundle, names)
        require_stack_memory(self.bundle, names, text=self.place.text)

    def _stop_together(self, names: Iterable[str], timeout_s: float | None) -> None:
        asked = [name for name in names if self._children.signal(name, signal.SIGTERM)]
        began = time.monotonic()
        for name in asked:
            self._say(name, "stopping")
            limit = timeout_s if timeout_s is not None else PARTS[name].stop_s
            if not self._children.wait_gone(name, max(0.0, began + limit - time.monotonic())):
                self.kill(name)
            self._say(name, "stopped")

    def _status(self, name: str) -> PartStatus:
        stopped = PartStatus(
            name=name, running=False, problem="not running", address=self.address(name), log=str(self.log(name))
        )
        process = self._children.find(name)
        if process is None:
            return stopped
        memory, uptime = 0.0, 0.0
        with suppress(psutil.Error):
            family = [process, *process.children(recursive=True)]
            memory = sum(member.memory_info().rss for member in family) / 2**20
            uptime = time.time() - process.create_time()
        return replace(
            stopped,
            running=True,
            problem=self.components[name].probe(self.place),
            pid=process.pid,
            memory_mb=round(memory, 1),
            uptime_s=round(uptime, 1),
        )


def up_together(stacks: Sequence[Stack], only: Sequence[str], *, timeout_s: float) -> None:
    """Start the parts of several stacks, one stack per processor at once. It raises what `up` raises."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda one: one.up(only, timeout_s=timeout_s), stacks))
