"""A stack's record in its state folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from services.contracts.processes import PROCESSES, TEXT
from services.platform.machine import PortTaken
from services.stack.compose import Profile
from services.stack.errors import StackError
from services.stack.folders import DEFAULT_STATE, StateFolder
from services.stack.ports import LOOPBACK, PARTS, Ports

# For each shard, each replica's ports by name.
Shards = list[list[dict[str, int]]]


@dataclass(frozen=True, kw_only=True)
class Note:
    """The last `up`'s parameters, None if not recorded."""

    ports: Ports | None = None
    bundle: str | None = None
    text: str | None = None
    profile: Profile | None = None
    workers: int = 1
    shards: Shards = field(default_factory=list)
    console: bool = False

    @classmethod
    def read(cls, folder: StateFolder) -> "Note":
        """Read the record; an empty one if absent or unreadable."""
        try:
            noted = json.loads(note_file(folder).read_text(encoding="utf-8"))
            return TypeAdapter(cls).validate_python(noted | {"ports": {"numbers": noted["ports"]}})
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def write(self, folder: StateFolder) -> None:
        """Replace the folder's record."""
        numbers = {} if self.ports is None else dict(self.ports.numbers)
        noted = {**self.__dict__, "ports": numbers}
        note_file(folder).write_text(json.dumps(noted, indent=1), encoding="utf-8")

    def require_same(self, wanted: "Note", running: Sequence[str]) -> None:
        """Check that `wanted` has the parameters of the running parts. Raises: StackError."""
        if not running:
            return
        them = ", ".join(running)
        if self.ports is not None and self.ports != wanted.ports:
            raise StackError(
                "ports",
                f"{them} run already with other ports ({running[0]} on {self.ports[running[0]]})",
                advice="freshet down first, or name another state folder",
            )
        if self.profile is not None and (self.profile, self.workers) != (wanted.profile, wanted.workers):
            workers = f" and {self.workers} workers" if self.workers > 1 else ""
            problem = f"{them} run already with the profile {self.profile}{workers}"
            raise StackError("profile", problem, advice="freshet down first")
        if self.ports is not None and self.shards != wanted.shards:
            shards, replicas = counts(self.shards)
            problem = f"{them} run already with {shards} shards of {replicas} replicas"
            raise StackError("shards", problem, advice="freshet down first")
        with_model = [name for name in running if PARTS[name].needs_bundle]
        with_text = [name for name in running if name in PROCESSES and TEXT in PROCESSES[name].state]
        for what, names, path, own in (
            ("bundle", with_model, self.bundle, wanted.bundle),
            ("text bundle", with_text, self.text, wanted.text),
        ):
            if names and path is not None and path != own:
                problem = f"{', '.join(names)} run already with the {what} {path}"
                raise StackError(what, problem, advice="freshet down first")


def note_file(folder: StateFolder) -> Path:
    """Return the path; `freshet down` removes it."""
    return folder.run / "stack.json"


def bundle_file(folder: StateFolder) -> Path:
    """Return the path that names the bundle in use."""
    return folder.root / "bundle-in-use"


def taken_over(folder: StateFolder) -> str:
    """Return the bundle that replaced `<state>/bundle`, or "" if none did."""
    file = bundle_file(folder)
    return file.read_text(encoding="utf-8") if file.exists() else ""


def new_shards(shards: int, replicas: int) -> Shards:
    """Return shards and replicas on free ports, or [] for one shard."""
    return [[Ports.free().of("candidates") for _ in range(replicas)] for _ in range(shards)] if shards > 1 else []


def counts(shards: Shards) -> tuple[int, int]:
    """Return the numbers of shards and replicas."""
    return (len(shards), len(shards[0])) if shards else (1, 1)


def shard_addresses(shards: Shards) -> str:
    """Return the addresses in the gateway's format."""
    return ";".join(",".join(f"{LOOPBACK}:{ports['candidates']}" for ports in one) for one in shards)


def port_advice(taken: PortTaken, own: Path, command: str) -> str:
    """Return what frees a taken port: the command that stops another stack with this port, or one with other ports.

    Searched are the default state folder and those in it, such as .freshet/quickstart, except the state folder `own`.
    """
    for folder in (DEFAULT_STATE, *sorted(DEFAULT_STATE.glob("*/"))):
        ports = Note.read(StateFolder(folder)).ports
        if folder.resolve() != own.resolve() and ports is not None and taken.port in ports.numbers.values():
            return f"freshet down --state {folder}, or freshet {command} --port-offset 1000"
    return f"freshet doctor, or freshet {command} --port-offset 1000"
