"""What a stack notes in its state folder, so that whoever opens the folder later sees the same stack."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.contracts.processes import PROCESSES, TEXT
from services.stack.compose import Profile
from services.stack.errors import StackError
from services.stack.folders import StateFolder
from services.stack.ports import LOOPBACK, PARTS, Ports, owner

# By shard, its replicas' ports by name.
Shards = list[list[dict[str, int]]]


@dataclass(frozen=True, kw_only=True)
class Note:
    """Of the last `up`; None where there was none."""

    ports: Ports | None = None
    bundle: str | None = None
    text: str | None = None
    profile: Profile | None = None
    workers: int = 1
    shards: Shards = field(default_factory=list)
    console: bool = False

    @classmethod
    def read(cls, folder: StateFolder) -> "Note":
        """The folder's; an empty one where there is none that can be read."""
        try:
            noted = json.loads(note_file(folder).read_text(encoding="utf-8"))
            return cls(
                ports=Ports(noted["ports"]),
                bundle=str(noted["bundle"]),
                text=noted.get("text"),
                profile=noted.get("profile", "split"),
                workers=int(noted.get("workers", 1)),
                shards=[
                    [{name: int(port) for name, port in ports.items()} for ports in one]
                    for one in noted.get("shards", [])
                ],
                console=bool(noted.get("console", False)),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def write(self, folder: StateFolder) -> None:
        """Replace the folder's."""
        numbers = {} if self.ports is None else dict(self.ports.numbers)
        noted = {**self.__dict__, "ports": numbers}
        note_file(folder).write_text(json.dumps(noted, indent=1), encoding="utf-8")

    def require_same(self, wanted: "Note", running: Sequence[str]) -> None:
        """Raise StackError when parts run already with other ports than these, or with another bundle, say."""
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
    """Where it lies; `freshet down` removes it."""
    return folder.run / "stack.json"


def bundle_file(folder: StateFolder) -> Path:
    """Names the bundle that took the place of `<state>/bundle`."""
    return folder.root / "bundle-in-use"


def taken_over(folder: StateFolder) -> str:
    """The bundle that took the place of `<state>/bundle`; "" where none did."""
    file = bundle_file(folder)
    return file.read_text(encoding="utf-8") if file.exists() else ""


def new_shards(shards: int, replicas: int) -> Shards:
    """So many shards of so many replicas on free ports; none for one shard."""
    return [[_free_candidates() for _ in range(replicas)] for _ in range(shards)] if shards > 1 else []


def counts(shards: Shards) -> tuple[int, int]:
    """How many shards, and replicas of each."""
    return (len(shards), len(shards[0])) if shards else (1, 1)


def shard_addresses(shards: Shards) -> str:
    """Of the candidates, as the gateway takes them."""
    return ";".join(",".join(map(_candidates_address, one)) for one in shards)


def _free_candidates() -> dict[str, int]:
    return {port: number for port, number in Ports.free().numbers.items() if owner(port) == "candidates"}


def _candidates_address(ports: Mapping[str, int]) -> str:
    return f"{LOOPBACK}:{ports['candidates']}"
