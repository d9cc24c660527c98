"""Figures with a plot below them, and the reports that all open pages share."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from freshet_client import AsyncClient
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from services.console.frame import panel, text

# A grey that is legible on light and dark backgrounds.
GREY, COLOURS = "#7b8f99", ("#1098ad", "#d6861c", "#7c5cd6", "#17803d", "#b3400f", "#51646f", "#a61b1b")
AXIS = {"axisLabel": {"color": GREY}, "splitLine": {"lineStyle": {"color": GREY, "opacity": 0.25}}}
T = TypeVar("T")
_SHARED: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def shared(make: Callable[[AsyncClient], T], client: AsyncClient) -> T:
    """Return the object that all open pages of a client share, made by the first one."""
    found = _SHARED.get((make, client))
    if found is None:
        found = _SHARED[make, client] = make(client)
    return found


class Watch(Generic[T]):
    """A report that all pages of a key share, fetched at most every `every_s` seconds, by a page that looks."""

    def __init__(self, ask: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._ask, self._every_s, self._lock = ask, every_s, asyncio.Lock()
        self._asked_s, self._found = float("-inf"), list[T]()

    async def look(self) -> T:
        """Return the report; fetch it if the last one is old. Raises: FreshetError."""
        async with self._lock:
            if not self._found or time.monotonic() - self._asked_s >= 0.9 * self._every_s:
                self._asked_s = time.monotonic()
                self._found = [await self._ask()]
            return self._found[0]


def figure(name: str, means: str, points: int, over: str, *, lines: int = 1) -> tuple[TextElement, ui.echart]:
    """A panel with a number and a plot of its last `points` values. over: their time, in words."""
    with panel(name):
        shown = text("p", "–", "figure")
        text("p", means, "hint")
        return shown, plot(_options(lines, points), f"{name}, over {over}")


def plot(options: dict[str, Any], label: str) -> ui.echart:
    """A plot, with its name for screen readers."""
    chart = ui.echart(options).classes("plot")
    chart.props.update({"role": "img", "aria-label": label})
    return chart


def _options(lines: int, points: int) -> dict[str, Any]:
    return {
        "animation": False,
        "grid": {"left": 44, "right": 8, "top": 12, "bottom": 8},
        "xAxis": {"type": "value", "min": 0, "max": points, "show": False},
        "yAxis": AXIS | {"type": "value", "min": 0, "minInterval": 0.1, "splitNumber": 3},
        "series": [
            {
                "type": "line",
                "showSymbol": False,
                "data": [],
                "lineStyle": {"width": 2, "color": colour},
                "areaStyle": {"color": colour, "opacity": 0.18 if place == 0 else 0},
            }
            for place, colour in enumerate(COLOURS[:lines])
        ],
    }


def draw(chart: ui.echart, series: Sequence[Sequence[float]]) -> None:
    """Draw the values, the newest one at the right edge."""
    for line, values in zip(chart.options["series"], series, strict=True):
        start = chart.options["xAxis"]["max"] - len(values) + 1
        line["data"] = [[start + place, round(value, 3)] for place, value in enumerate(values)]
    chart.update()
