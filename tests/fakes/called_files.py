"""Which files of the deployed part a call passes through, and what CONTRIBUTING.md says of it."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import normpath
from pathlib import Path
from typing import Any

SERVICES = Path(__file__).resolve().parents[2] / "services"
NOT_DEPLOYED = ("offline", "cli", "stack")


class Calls:
    """Files of the deployed part with the functions that were called there, while `watch` runs."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}
        self._on = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if not self._on or event != "call":
            return
        path = Path(normpath(frame.f_code.co_filename))  # chaos imports by tests/..
        if path.is_relative_to(SERVICES):
            name = path.relative_to(SERVICES)
            if name.parts[0] not in NOT_DEPLOYED:
                self.found.setdefault(str(name), set()).add(frame.f_code.co_qualname)


@contextmanager
def noted_calls() -> Iterator[Calls]:
    """In this thread, and in those that begin meanwhile."""
    found, before = Calls(), sys.getprofile()
    sys.setprofile(found)
    threading.setprofile(found)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def listed(what: str, column: int) -> set[str]:
    """The files in a column of the table of CONTRIBUTING.md that begins with `what`."""
    text = (SERVICES.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, table = text.partition(f"| {what} | ")
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    found = set()
    for row in rows:
        folder = row[1].strip().strip("`")
        found |= {f"{folder}/{name}" for name in re.findall(r"`([^`]+\.py)`", row[column])}
    return found
