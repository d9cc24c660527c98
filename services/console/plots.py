"""Figures with a plot below them, and the reports that all open pages share."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

from freshet_client import AsyncClient
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from services.console.elements import box, panel, text

# A grey that is legible on light and dark backgrounds.
GREY, COLOURS = "#7b8f99", ("#1098ad", "#d6861c", "#7c5cd6", "#17803d", "#b3400f", "#51646f", "#a61b1b")
AXIS = {"axisLabel": {"color": GREY}, "splitLine": {"lineStyle": {"color": GREY, "opacity": 0.25}}}
T = TypeVar("T")
_SHARED: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def shared(make: Callable[[AsyncClient], T], client: AsyncClient) -> T:
    """Return the object that all open pages of a client share. The first page makes it."""
    return cast(T, _SHARED.setdefault((make, client), make(client)))


class Watch(Generic[T]):
    """The last `kept` reports, which all pages of a key share. `look` fetches a report if the last one is old."""

    def __init__(self, ask: Callable[[], Awaitable[T]], every_s: float, kept: int = 1) -> None:
        self._ask, self._every_s, self._lock = ask, every_s, asyncio.Lock()
        self._asked_s, self._found = float("-inf"), deque[T](maxlen=kept)

    async def look(self) -> list[T]:
        """Return the reports, the newest last. Raises: FreshetError."""
        async with self._lock:
            if not self._found or time.monotonic() - self._asked_s >= 0.9 * self._every_s:
                self._asked_s = time.monotonic()
                self._found.append(await self._ask())
            return list(self._found)


class Figures:
    """Panels with a number and a plot. of: a panel's name, meaning, number of lines. over: the time of the points."""

    def __init__(self, of: Sequence[tuple[str, str, int]], points: int, over: str) -> None:
        self._all: list[tuple[TextElement, ui.echart]] = []
        with box("div", "figures"):
            for name, means, lines in of:
                with panel(name):
                    number = text("p", "–", "figure")
                    text("p", means, "hint")
                    self._all.append((number, _newest(lines, points, f"{name}, over {over}")))

    def show(self, values: Sequence[tuple[str, Sequence[Sequence[float]]]], *, draws: bool = True) -> None:
        """Show each panel's number, and draw its lines with the newest value at the right. draws: False omits lines."""
        for (number, chart), (shown, lines) in zip(self._all, values, strict=True):
            number.set_text(shown)
            if draws:
                for line, points in zip(chart.options["series"], lines, strict=True):
                    start = chart.options["xAxis"]["max"] - len(points) + 1
                    line["data"] = [[start + place, round(value, 3)] for place, value in enumerate(points)]
                chart.update()


def plot(lines: Sequence[dict[str, Any]], label: str, **options: dict[str, Any]) -> ui.echart:
    """Make a plot of lines. label: its name for screen readers. options: further options of ECharts."""
    chart = ui.echart({"animation": False, "series": lines} | options).classes("plot")
    chart.props.update({"role": "img", "aria-label": label})
    return chart


def _newest(num_lines: int, points: int, label: str) -> ui.echart:
    areas = [{"opacity": 0.18}, *[{"opacity": 0}] * (num_lines - 1)]
    return plot(
        [series(colour, [], lineStyle={"width": 2}, areaStyle=of) for colour, of in zip(COLOURS, areas, strict=False)],
        label,
        grid={"left": 44, "right": 8, "top": 12, "bottom": 8},
        xAxis={"type": "value", "min": 0, "max": points, "show": False},
        yAxis=AXIS | {"type": "value", "min": 0, "minInterval": 0.1, "splitNumber": 3},
    )


def series(colour: str, data: list[list[float]], **options: Any) -> dict[str, Any]:
    """A line through points, with other options of ECharts."""
    return {"type": "line", "showSymbol": False, "color": colour, "data": data} | options
