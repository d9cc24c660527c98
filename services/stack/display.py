"""Shows the start of the stack, with a line for each part's step and duration. A terminal updates the lines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.stack.components.component import Say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Shorter steps show no clock.
_SHOW_CLOCK_AFTER_S = 2.0
_DONE = ("ready", "stopped")


class PartLines:
    """The parts' newest lines, as a table."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[str, float]] = {}

    def say(self, part: str, doing: str) -> None:
        """Record a change."""
        self._lines[part] = (doing, time.monotonic())

    def __rich__(self) -> "RenderableType":
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for part, (doing, since) in self._lines.items():
            done = doing.startswith(_DONE)
            elapsed = time.monotonic() - since
            clock = f"{elapsed:.0f} s" if not done and elapsed > _SHOW_CLOCK_AFTER_S else ""
            mark: RenderableType = Text("✓", style="green") if done else Spinner("dots")
            table.add_row(mark, part, Text(doing, style="dim" if done else ""), Text(clock, style="dim"))
        return table


@contextmanager
def showing(console: "Console | None") -> Iterator[Say]:
    """Yield a `say` that shows progress on `console`, or shows nothing if `console` is None."""
    if console is None:
        yield lambda part, doing: None
        return
    if not console.is_terminal:
        yield lambda part, doing: console.print(f"{part:18}{doing}")
        return
    from rich.live import Live

    lines = PartLines()
    with Live(lines, console=console, refresh_per_second=10):
        yield lines.say
