"""Print the demo's numbered steps while it runs, and its figures as tables at the end."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from services.offline.demo.sittings import FIRST, LATER_DAY, SAME_DAY, SAME_SITTING, SITTING_MINUTES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table

# Displayed name by summary key, in the table's order.
_CONTENDERS = {
    "model": "the model, states kept fresh by the stream",
    "model_with_token": "the same, asked with the freshness token",
    "frozen_state": "the same model, states frozen at the split",
    "item_knn": "item-kNN, learning from every event",
    "recent_popularity": "recently popular items not yet seen",
    "popularity": "most popular items not yet seen",
}
_BASELINES = {"item_knn": "item-kNN", "recent_popularity": "recent", "popularity": "popular"}
_OTHER_KINDS = {SAME_DAY: "later on the same day", FIRST: "first events of new users"}
_STAGES = {
    "queue": "of Recommend: waiting in queues",
    "encode": "of the stream: encoding the users of a poll",
    "first_stage": "of Recommend: search",
    "transport": "of Recommend: network, state reads, the rest",
}
STEPS = ("components", "interactions", "training", "export", "stack", "past", "stream", "evaluation")

# Expected seconds with MovieLens-1M on two cores; all other steps together take some seconds.
_SECONDS = {"components": 1.0, "training": 185.0, "export": 12.0, "stack": 10.0, "past": 30.0, "evaluation": 5.0}
_LEAST_TOLD_S = 20.0


class Stopwatch:
    """Measures the seconds of each part and the total."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time, also if it fails."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = round(self.parts.get(name, 0.0) + time.monotonic() - started, 2)

    @property
    def total(self) -> float:
        return round(time.monotonic() - self._started, 2)


class Display:
    """Prints to one console."""

    def __init__(self, console: "Console") -> None:
        self.console = console
        self._expected = dict(_SECONDS)
        self._began: dict[str, float] = {}

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Replace the expected seconds of steps."""
        self._expected |= seconds

    def step(self, name: str, says: str) -> None:
        """Announce one of STEPS and the remaining time."""
        self._began[name] = time.monotonic()
        self.console.print(f"{STEPS.index(name) + 1}/{len(STEPS)} {name}", style="bold cyan", end="  ")
        self.console.print(says, soft_wrap=True, end=" ")
        self.console.print(f"({self._left(name)})", style="dim", soft_wrap=True)

    def _left(self, name: str) -> str:
        """Return the remaining minutes, scaled by the earlier steps' ratio of measured to expected seconds.

        The stream is not scaled: its rate is the same on every machine.
        """
        began = list(self._began.items())
        earlier = [(one, end - at) for (one, at), (_, end) in pairwise(began) if one != "stream"]
        expected = sum(self._expected.get(one, 0.0) for one, _ in earlier)
        factor = sum(took for _, took in earlier) / expected if expected >= _LEAST_TOLD_S else 1.0
        rest = {one: self._expected.get(one, 0.0) for one in STEPS[STEPS.index(name) :]}
        stream = rest.pop("stream", 0.0)
        minutes = (stream + factor * sum(rest.values())) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"

    def fact(self, says: str) -> None:
        """Print a detail under the current step."""
        self.console.print(f"    {says}", style="dim", soft_wrap=True)

    def progress(self) -> "Progress":
        """Return a progress bar that redraws only twice a second, because the measured processes share the cores."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        return Progress(
            TextColumn("   "),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.description}", style="dim"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=2,
            transient=True,
        )


def figures(summary: Mapping[str, Any]) -> "RenderableType":
    """Return the summary as tables."""
    from rich.console import Group

    sections = [
        _quality(summary),
        *_overload(summary),
        "",
        _times(summary),
        "",
        _events(summary),
        "",
        _components(summary),
    ]
    return Group(*sections)


def _quality(summary: Mapping[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    rates, by_sitting = summary["hit_rate_at_10"], summary["hit_rate_at_10_by_sitting"]
    best = summary["over_best_baseline"]["baseline"]
    # The headings' line ends make the table fit 80 columns.
    table = _table(
        "hit rate at 10", "all", "same\nsitting", "later\nday", f"× {_BASELINES.get(best, 'best')}", width=43
    )
    shown = (by_sitting[SAME_SITTING], by_sitting[LATER_DAY])
    for name, says in _CONTENDERS.items():
        rate = rates.get(name)
        if rate is None:
            continue
        times = f"{rate / rates[best]:.2f}" if best and name not in _BASELINES else ""
        table.add_row(says, f"{rate:.4f}", *(_number(part.get(name), 4) for part in shown), times)
    table.add_row(
        "predicted events",
        f"{sum(part['events'] for part in by_sitting.values()):,}",
        *(f"{part['events']:,}" for part in shown),
        "",
        style="dim",
    )
    rest = ", ".join(f"{by_sitting[kind]['events']:,} {says}" for kind, says in _OTHER_KINDS.items())
    note = (
        f"same sitting: less than {SITTING_MINUTES} minutes after the user's previous event; later day: after that, "
        f"and on a later UTC day; the others: {rest}"
    )
    if "item_knn" not in rates:
        note += "; item-kNN is left out: its counts of pairs would take too much memory for this many items"
    return Group(table, Text(note, style="dim"))


def _overload(summary: Mapping[str, Any]) -> "Iterator[RenderableType]":
    """Explain an overload, which lowers the hit rates of the model but not those of the baselines."""
    from rich.text import Text

    answers, rate = summary["answers"], summary["rates_per_s"]["events"]
    busy, failed = answers["degradations"].get("DEGRADATION_BUSY", 0), sum(answers["errors"].values())
    if busy or failed:
        yield Text(
            f"the machine was too busy for {rate:.0f} events a second: {busy:,} of "
            f"{sum(answers['state_sources'].values()):,} answers are marked BUSY, {failed:,} calls failed. The model's "
            f"hit rates count them. Close what else runs here, or try --rate {max(1, rate / 2):.0f}",
            style="yellow",
        )


def _times(summary: Mapping[str, Any]) -> "RenderableType":
    rates = summary["rates_per_s"]
    table = _table("milliseconds", "p50", "p95", "p99")
    rows = (
        (f"Recommend, {rates['recommend']:.0f} a second beside {rates['events']:.0f} events", summary["recommend_ms"]),
        ("Recommend with a freshness token", summary["recommend_with_token_ms"]),
        ("event acknowledged → recommendations reflect it", summary["freshness_ms"]),
        ("event sent → acknowledged by Kafka", summary["acknowledge_ms"]),
    )
    for says, values in rows:
        table.add_row(says, *(_number(values.get(name)) for name in ("p50", "p95", "p99")))
    for stage, value in summary["stages_ms"].items():
        table.add_row(
            f"  {_STAGES.get(stage, stage)}",
            _number(value),
            "",
            _number(summary["stages_p99_ms"].get(stage)),
            style="dim",
        )
    return table


def _events(summary: Mapping[str, Any]) -> "RenderableType":
    events = summary["events"]
    table = _table("events", "")
    for name, says in (
        ("sent", "sent (distinct acknowledged event ids)"),
        ("applied", "applied"),
        ("dead_lettered", "dead-lettered (sent broken on purpose)"),
        ("duplicates", "recognised as duplicates (sent twice on purpose)"),
    ):
        table.add_row(says, f"{events[name]:,}")
    table.add_row("sent = applied + dead-lettered", "yes" if events["adds_up"] else "NO")
    return table


def _components(summary: Mapping[str, Any]) -> "RenderableType":
    table = _table("what ran", "version")
    for name, version in summary["components"].items():
        table.add_row(name, str(version))
    return table


def _table(first: str, *others: str, width: int = 48) -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first, min_width=width)
    for name in others:
        table.add_column(name, justify="left" if name in ("", "version") else "right")
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
