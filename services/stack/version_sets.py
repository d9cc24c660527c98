"""Further version sets of a local stack, each a small stack in `STATE/sets/NAME`.

A set has candidates, a reranker and a refresher, and with a text bundle a generator. It uses the stack's other parts.
"""

import json
import shutil
from pathlib import Path

from services.stack.components.component import Say
from services.stack.launcher import Stack
from services.stack.ports import Ports, owner

_OWN, _TEXT = ("candidates", "reranker", "refresher"), "generator"


def set_parts(stack: Stack) -> tuple[str, ...]:
    """Return the parts of a set's stack."""
    return (*_OWN, _TEXT) if (stack.place.text / "manifest.json").exists() else _OWN


def new_set(main: Stack, name: str, bundle: Path, text: Path | None, say: Say | None = None) -> Stack:
    """Return a new set's stack on free ports, recorded but not started."""
    free = Ports.free()
    folder = _folder(main, name)
    numbers = {port: number for port, number in free.numbers.items() if owner(port) in (*_OWN, _TEXT)}
    noted = {"bundle": str(bundle.resolve()), "text": "" if text is None else str(text.resolve()), "ports": numbers}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "set.json").write_text(json.dumps(noted, indent=1), encoding="utf-8")
    return find_set(main, name, say)


def find_set(main: Stack, name: str, say: Say | None = None) -> Stack:
    """Return the stack of a recorded set. Raises: FileNotFoundError."""
    folder = _folder(main, name)
    noted = json.loads((folder / "set.json").read_text(encoding="utf-8"))
    return Stack(
        folder / "stack",
        bundle=noted["bundle"],
        text=noted["text"] or folder / "text",
        ports=Ports({**main.ports.numbers, **noted["ports"]}),
        profile="split",
        say=say,
    )


def set_names(main: Stack) -> list[str]:
    """Return all recorded sets' names."""
    return sorted(found.parent.name for found in main.place.state.root.glob("sets/*/set.json"))


def remove_set(main: Stack, name: str) -> None:
    """Stop a set, and remove its record and logs."""
    find_set(main, name).down()
    shutil.rmtree(_folder(main, name))


def _folder(main: Stack, name: str) -> Path:
    return main.place.state.root / "sets" / name
