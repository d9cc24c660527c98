"""Results of an experiment: by arm and over time, with intervals, for all answers or a part of them.

The page shows the file that `freshet results --publish` wrote, and its age. A key that may list experiments may see it.
"""

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from freshet.v1 import gateway_pb2
from nicegui import ui

from services.console.elements import box, choice, handle, link, panel, refill, table, text
from services.console.frame import Page
from services.console.plots import AXIS, COLOURS, GREY, plot, series
from services.console.sentences import ago, date_text

EVERY_S = 10.0


class Results(Page):
    async def show(self) -> None:
        self._name, self._metric, self._part = (self.query.get(name, "") for name in ("name", "metric", "part"))
        self._shown = ""
        self._age = text("p", "", "hint", role="status")
        self._body = box("div", "wide")
        await handle(self._look)
        ui.timer(EVERY_S, partial(handle, self._look))

    async def _look(self) -> None:
        """Fetch the experiments and the published results; draw again if they changed."""
        found = await self.client.call("ListExperiments", gateway_pb2.ListExperimentsRequest())
        names = [one.name for one in reversed(found.experiments)]
        if self._name not in names:
            published = (one for one in names if read_results(self.settings.state, one))
            self._name = next(published, names[0] if names else "")
        made = read_results(self.settings.state, self._name) if self._name else None
        until = datetime.fromtimestamp(made["until_ms"] / 1000, UTC) if made else None
        self._age.set_text(f"Until {date_text(until)}, {ago(until)} ago." if until else "")
        if (shown := json.dumps([names, made])) != self._shown:
            self._shown = shown
            with refill(self._body):
                self._show(names, made)

    def _show(self, names: list[str], made: dict[str, Any] | None) -> None:
        if not names:
            return
        parts = {one["name"]: one for one in made["parts"]} if made else {}
        part = self._part if self._part in parts else ""
        metric = self._metric if made and self._metric in made["metrics"] else made["metrics"][0] if made else ""

        def go(**chosen: str) -> None:
            ui.navigate.to(link("/results", **{"name": self._name, "metric": metric, "part": part} | chosen))

        with box("div", "row end"):
            choice("Experiment", names, self._name, lambda name: go(name=name, part=""))
            if made:
                choice("Metric", made["metrics"], metric, lambda name: go(metric=name))
                choice("Answers", list(parts), part, lambda name: go(part=name), empty="all")
        if made is None:
            text("p", "Nothing is published. This publishes results every 20 seconds:")
            text("pre", self.settings.command(f"results {self._name} --metric click --follow"), tabindex="0")
            return
        one = parts[part]
        rows = [row for row in one["rows"] if row["metric"] == metric]
        _table(made, one, [row for row in rows if rows and row["at_ms"] == rows[-1]["at_ms"]], metric)
        looks = "A part is one more look: its intervals are not corrected for the number of parts."
        for sentence in [*one.get("remarks", ()), *([looks] if part else [])]:
            text("p", sentence, "hint")
        if any("low" in row for row in rows):
            with panel(f"{metric} per user, less {made['control']}, with 95 % intervals", "Over time"):
                arms = [arm for arm in one["arms"] if arm != made["control"]]
                _plot(rows, arms)


def read_results(state: Path | None, name: str) -> Any:
    """Return an experiment's published results, or None."""
    path = None if state is None else state / "results" / f"{name}.json"
    return json.loads(path.read_bytes()) if path is not None and path.exists() else None


def _table(made: dict[str, Any], one: dict[str, Any], last: list[dict[str, Any]], metric: str) -> None:
    by_arm = {row["arm"]: row for row in last}
    rows = []
    for arm, counts in one["arms"].items():
        row = by_arm.get(arm, {})
        mean = f"{row['mean']:.4f}" if row.get("mean") is not None else "–"
        verdict = _verdict(row, arm, made["control"], [metric, arm] in one["broken"])
        numbers = (f"{counts[name]:,}" for name in ("users", "counted", "exposures"))
        rows.append((arm or "interleaved", *numbers, mean, _interval(row), verdict))
    with panel("By arm"):
        table(("arm", "users", "counted", "exposures", f"{metric} per user", f"less {made['control']}", ""), rows)


def _interval(row: dict[str, Any]) -> str:
    if "low" not in row:
        return "–"
    relative = f" ({row['relative']:+.1%})" if row["relative"] is not None else ""
    return f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]{relative}"


def _verdict(row: dict[str, Any], arm: str, control: str, is_broken: bool) -> str:
    if arm in ("", control):
        return "control" if arm else ""
    if "low" not in row:
        return "too few users yet"
    if is_broken:
        return "breaks its guardrail"
    return "higher" if row["low"] > 0 else "lower" if row["high"] < 0 else "open"


def _plot(rows: list[dict[str, Any]], arms: list[str]) -> None:
    """Plot a line and a band for each arm."""
    lines = []
    for colour, arm in zip(COLOURS, arms, strict=False):
        of = [row for row in rows if row["arm"] == arm and "low" in row]
        band: dict[str, Any] = {"stack": arm, "stackStrategy": "all", "silent": True, "lineStyle": {"opacity": 0}}
        heights = [[row["at_ms"], row["high"] - row["low"]] for row in of]
        lines.append(series(colour, [[row["at_ms"], row["low"]] for row in of], **band))
        lines.append(series(colour, heights, areaStyle={"opacity": 0.18}, **band))
        lines.append(series(colour, [[row["at_ms"], row["difference"]] for row in of], name=arm))
    plot(
        lines,
        "The difference of each arm over time",
        grid={"left": 64, "right": 16, "top": 32, "bottom": 28},
        legend={"top": 0, "data": arms, "textStyle": {"color": GREY}},
        xAxis=AXIS | {"type": "time"},
        yAxis=AXIS | {"type": "value", "scale": True},
    )
