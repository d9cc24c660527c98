"""Results of an experiment: by arm and over time, with intervals, for all answers or a part of them.

The page shows the file that `freshet results --publish` wrote, and its age. A key that may list experiments may see it.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from freshet.v1 import gateway_pb2
from nicegui import ui

from services.console.frame import Visit, box, choice, link, panel, text
from services.console.plots import AXIS, COLOURS, GREY, plot
from services.console.sentences import ago, date_text

EVERY_S = 10.0


class Results:
    def __init__(self, visit: Visit) -> None:
        self._client, self._settings, self._notice = visit.client, visit.settings, visit.notice
        self._name, self._metric, self._part = (visit.query.get(name, "") for name in ("name", "metric", "part"))
        self._shown = ""
        self._age = text("p", "", "hint", role="status")
        self._body = box("div", "wide")

    async def begin(self) -> None:
        await self._look()
        ui.timer(EVERY_S, self._look)

    async def _look(self) -> None:
        """Fetch the experiments and the published results; draw again if they changed."""
        with self._notice.failures():
            found = await self._client.call("ListExperiments", gateway_pb2.ListExperimentsRequest())
            names = [one.name for one in reversed(found.experiments)]
            if self._name not in names:
                published = (one for one in names if read_results(self._settings.state, one))
                self._name = next(published, names[0] if names else "")
            made = read_results(self._settings.state, self._name) if self._name else None
            until = datetime.fromtimestamp(made["until_ms"] / 1000, UTC) if made else None
            self._age.set_text(f"Until {date_text(until)}, {ago(until)} ago." if until else "")
            if (shown := json.dumps([names, made])) != self._shown:
                self._shown = shown
                self._body.clear()
                with self._body:
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
            text("pre", self._settings.command(f"results {self._name} --metric click --follow"), tabindex="0")
            return
        one = parts[part]
        rows = [row for row in one["rows"] if row["metric"] == metric]
        _table(made, one, [row for row in rows if rows and row["at_ms"] == rows[-1]["at_ms"]], metric)
        for sentence in _remarks(one, is_part=bool(part)):
            text("p", sentence, "hint")
        if any("low" in row for row in rows):
            with panel(f"{metric} per user, less {made['control']}, with 95 % intervals", "Over time"):
                arms = [arm for arm in one["arms"] if arm != made["control"]]
                plot(_options(rows, arms), "The difference of each arm over time")


def read_results(state: Path | None, name: str) -> Any:
    """Return an experiment's published results, or None."""
    path = None if state is None else state / "results" / f"{name}.json"
    return json.loads(path.read_bytes()) if path is not None and path.exists() else None


def _table(made: dict[str, Any], one: dict[str, Any], last: list[dict[str, Any]], metric: str) -> None:
    by_arm = {row["arm"]: row for row in last}
    heads = ("arm", "users", "counted", "exposures", f"{metric} per user", f"less {made['control']}", "")
    with panel("By arm"), box("table", "numbers"):
        with box("tr"):
            for name in heads:
                text("th", name, scope="col")
        for arm, counts in one["arms"].items():
            row = by_arm.get(arm, {})
            with box("tr"):
                text("th", arm or "interleaved", scope="row")
                for name in ("users", "counted", "exposures"):
                    text("td", f"{counts[name]:,}")
                text("td", f"{row['mean']:.4f}" if row.get("mean") is not None else "–")
                text("td", _interval(row))
                text("td", _verdict(row, arm, made["control"], [metric, arm] in one["broken"]))


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


def _remarks(one: dict[str, Any], *, is_part: bool) -> list[str]:
    """Sentences below the table: the preference, and the limits of these results."""
    said = []
    if one["is_ratio_broken"]:
        said.append("The arms' users do not fit their shares: users of one arm are lost. No difference is shown.")
    if one["preferred"] is not None:
        mean, low, high = one["preferred"]
        said.append(f"Preference for the second arm, from -1 to 1: {mean:+.3f} [{low:+.3f}, {high:+.3f}].")
    if is_part:
        said.append("A part is one more look: its intervals are not corrected for the number of parts.")
    for count, what in (
        (one["in_two_arms"], "users were shown two arms, and are left out."),
        (one["unknown_exposures"], "interactions name exposures that are not in the log."),
        *((users, f"users have more of {name} than is counted.") for name, users in one["capped"].items()),
    ):
        if count:
            said.append(f"{count:,} {what}")
    return said


def _options(rows: list[dict[str, Any]], arms: list[str]) -> dict[str, Any]:
    """A line and a band for each arm."""
    series = []
    for colour, arm in zip(COLOURS, arms, strict=False):
        of = [row for row in rows if row["arm"] == arm and "low" in row]
        band = {"type": "line", "stack": arm, "stackStrategy": "all", "showSymbol": False, "silent": True}
        band |= {"lineStyle": {"opacity": 0}, "color": colour}
        line = {"type": "line", "name": arm, "showSymbol": False, "color": colour}
        series += [
            band | {"data": [[row["at_ms"], row["low"]] for row in of]},
            band | {"data": [[row["at_ms"], row["high"] - row["low"]] for row in of], "areaStyle": {"opacity": 0.18}},
            line | {"data": [[row["at_ms"], row["difference"]] for row in of]},
        ]
    return {
        "animation": False,
        "grid": {"left": 64, "right": 16, "top": 32, "bottom": 28},
        "legend": {"top": 0, "data": arms, "textStyle": {"color": GREY}},
        "xAxis": AXIS | {"type": "time"},
        "yAxis": AXIS | {"type": "value", "scale": True},
        "series": series,
    }
