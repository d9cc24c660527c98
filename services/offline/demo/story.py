"""One person's view of the demo: their history, their top ten, what they then did, and their top ten after that.

Choosing whom to show is a pure function; the two top tens are real answers of the running gateway.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.offline.demo.plan import ReplayEvent

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVENTS_WANTED = 10
# Enough to know somebody by, few enough for ten events to matter.
_PAST_WANTED = range(20, 151)
_SHOWN_HISTORY = 8
_SHOWN_EVENTS = 12


@dataclass(kw_only=True)
class Story:
    """A person in the replay; item ids oldest first (history, events) or best first (before, after). times_s: of the
    first and the last event in the replay, unix seconds: when the answers are asked for."""

    user_id: str
    history: list[str]
    times_s: tuple[int, int]
    before: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def choose_person(events: Sequence[ReplayEvent], past: Mapping[str, Sequence[str]]) -> str | None:
    """The user with a past worth showing whose number of events is nearest to ten; None if nobody has a past.

    `past` is each user's item ids before the split, oldest first.
    """
    counts = Counter(event.user_id for event in events)
    for sizes in (_PAST_WANTED, range(1, 10**9)):
        known = [user for user in counts if len(past.get(user, ())) in sizes]
        if known:
            return min(known, key=lambda user: (abs(counts[user] - _EVENTS_WANTED), user))
    return None


def movement(item_id: str, rank: int, before: Sequence[str]) -> str:
    """ "new", "=" or how far it rose or fell since `before`; `rank` counts from 0."""
    if item_id not in before:
        return "new"
    moved = before.index(item_id) - rank
    if moved == 0:
        return "="
    return f"↑{moved}" if moved > 0 else f"↓{-moved}"


def render(story: Story, title: Callable[[str], str]) -> "RenderableType":
    """Two columns of titles: before and after, with what happened in between above them."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    lines = Text()
    lines.append(f"had, most recent last ({len(story.history)} in all)\n", style="bold")
    for item_id in story.history[-_SHOWN_HISTORY:]:
        lines.append(f"  {title(item_id)}\n")
    lines.append("then, while the stream ran\n", style="bold")
    hit = set(story.before)
    for item_id in story.events[:_SHOWN_EVENTS]:
        lines.append(f"  {title(item_id)}")
        lines.append("  recommended before\n" if item_id in hit else "\n", style="green")
    if len(story.events) > _SHOWN_EVENTS:
        lines.append(f"  and {len(story.events) - _SHOWN_EVENTS} more\n", style="dim")
    table = Table(box=None, header_style="bold", pad_edge=False, expand=True)
    table.add_column("", justify="right", style="dim", width=2)
    table.add_column("top 10 before", ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column("top 10 after", ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column("", justify="right", width=3)
    for rank in range(max(len(story.before), len(story.after))):
        old = title(story.before[rank]) if rank < len(story.before) else ""
        new, mark = "", ""
        if rank < len(story.after):
            new = title(story.after[rank])
            mark = movement(story.after[rank], rank, story.before)
        style = {"new": "bold green", "=": "dim"}.get(mark, "yellow")
        table.add_row(str(rank + 1), old, Text(new, style="bold" if mark == "new" else ""), Text(mark, style=style))
    return Panel(Group(lines, table), title=Text(f"user {story.user_id}"), title_align="left")
