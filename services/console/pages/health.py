"""Health: each part's state, the next step for a part that is not ready, charts by the minute, and dead letters."""

from dataclasses import replace
from functools import partial

from freshet_client import AsyncClient, DeadLetter, HealthReport, PartHealth, StreamPosition, Unreachable
from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from services.console.elements import box, button, confirmed, handle, panel, refill, text
from services.console.frame import Notice, Page
from services.console.plots import Figures, Watch, shared
from services.console.sentences import ago, date_text
from services.console.snippets import snippet

EVERY_S, HOUR = 2.0, 60
LETTERS_PER_TOPIC = 20
# The parts that an answer and an event pass through.
LANES = {
    "An answer": ("gateway", "redis", "candidates", "reranker", "generator"),
    "An event": ("kafka", "encoder", "refresher"),
}
FIGURES = (
    ("Calls a second", "of the last minute", 1),
    ("Milliseconds", "the median, and what 99 in 100 calls do not exceed", 2),
    ("Not as it should be", "late or failed calls; of the gateway also answers with a degradation, in percent", 1),
    ("Lag", "records that wait, or seconds until a change counts", 1),
)


def _watch(client: AsyncClient) -> Watch[HealthReport]:
    return Watch(partial(client.health, minutes=HOUR), EVERY_S)


class Health(Page):
    async def show(self) -> None:
        self._watch, self._chosen = shared(_watch, self.client), "gateway"
        self._report: HealthReport | None = None
        self._tiles: dict[str, tuple[Element, TextElement]] = {}
        self._verdict = text("p", "", "verdict", role="status")
        self._todo, self._advised = box("div", "stack"), ""
        self._lanes = box("section", "panel lanes", aria_label="Parts")
        self._about = text("h2", "")
        self._figures = Figures(FIGURES, HOUR, "an hour")
        self._since = text("p", "", "hint")
        with panel("Dead letters"):
            self._notice = Notice("notice", "alert")
            self._about_letters = text("p", "", "hint")
            self._letters = box("ul", "plain")
        await handle(self._tick)
        ui.timer(EVERY_S, partial(handle, self._tick))
        await self._show_letters()

    async def _tick(self) -> None:
        try:
            (self._report,) = await self._watch.look()
        except Unreachable:
            if self._report is None:
                raise
            # Keep the last report, with the gateway marked as not ready.
            away = partial(replace, ready=False, problem="it does not answer the console")
            parts = [away(one) if one.name == "gateway" else one for one in self._report.parts]
            self._report = replace(self._report, parts=tuple(parts))
        self._draw(self._report)

    def _draw(self, report: HealthReport) -> None:
        parts = {one.name: one for one in report.parts}
        if not self._tiles:
            self._make_tiles(parts)
        for name, (tile, line) in self._tiles.items():
            one = parts[name]
            line.set_text(f"ready · {_rate(one, report):,.1f}/s" if one.ready else _state(one))
            tile.classes(replace="tile" if one.ready else "tile out" if one.started else "tile off")
            tile.props["aria-pressed"] = str(name == self._chosen).lower()
            tile.update()
        self._say([one for one in report.parts if not one.ready], parts["gateway"])
        self._plot(parts[self._chosen], report)
        since = "" if report.since is None else f"{date_text(report.since)}, {ago(report.since)} ago"
        self._since.set_text(f"Minutes since this gateway's process started: {since}. A restart begins again.")

    def _make_tiles(self, parts: dict[str, PartHealth]) -> None:
        with self._lanes:
            for label, names in LANES.items():
                with box("div", "lane"):
                    text("span", label, "hint")
                    for name in filter(parts.__contains__, names):
                        with box("button", "tile", type="button") as tile:
                            text("strong", name)
                            self._tiles[name] = tile, text("span", "", "hint")
                        tile.on("click", partial(self._choose, name))

    def _choose(self, name: str) -> None:
        self._chosen = name
        if self._report is not None:
            self._draw(self._report)

    def _say(self, out: list[PartHealth], gateway: PartHealth) -> None:
        share, calls = (_shares(gateway)[-1], gateway.calls[-1]) if gateway.calls else (0.0, 0)
        well = f"Every part is ready; {share:.0f}% of the {calls:,} answers of this minute are degraded."
        verdicts = [f"{one.name} is {_state(one)}: {one.problem}. Meanwhile {one.effect}." for one in out]
        self._verdict.set_text(" ".join(verdicts) or well)
        self._verdict.classes(replace="verdict out" if any(one.started for one in out) else "verdict")
        # Advise `doctor` for a part that answers, `up` for one that does not.
        words = "doctor" if out and "answer" not in out[0].problem else f"up --only {out[0].name}" if out else ""
        advice = self.settings.command(words) if words else ""
        if advice != self._advised:
            self._advised = advice
            with refill(self._todo):
                if advice:
                    text("p", "Next:")
                    snippet("a command", advice)
                    text("p", "The runbook is docs/operate/runbooks/PartIsDown.md.", "hint")

    def _plot(self, part: PartHealth, report: HealthReport) -> None:
        self._about.set_text(f"{part.name}, by the minute")
        seconds = [60.0] * (len(part.calls) - 1) + [max(1.0, report.last_minute_seconds)]
        rates = [calls / of for calls, of in zip(part.calls, seconds, strict=False)]
        lag = max(0.0, part.lag[-1]) if part.lag else 0.0
        self._figures.show(
            [
                (f"{_rate(part, report):,.1f}", [rates]),
                (f"{part.p50_ms[-1]:,.1f} · {part.p99_ms[-1]:,.1f}", [part.p50_ms, part.p99_ms]),
                (f"{_shares(part)[-1]:.1f}%", [_shares(part)]),
                (f"{lag:,.4g} {part.lag_unit}" if part.lag_unit else "–", [[max(0.0, one) for one in part.lag]]),
            ]
        )

    async def _show_letters(self) -> None:
        with self._letters:
            if not self.may("operator"):
                return
        with self._notice.failures():
            found = await self.client.dead_letters(max_letters=LETTERS_PER_TOPIC)
            older = f" Older ones: {self.settings.command('dead-letters list')}." if found.has_older else ""
            about = f"The newest unusable records, at most {LETTERS_PER_TOPIC} of a topic.{older}"
            self._about_letters.set_text(about if found.letters else "No record is set aside.")
            with self._letters:
                for letter in found.letters:
                    self._letter(letter)

    def _letter(self, letter: DeadLetter) -> None:
        with box("li", "letter"):
            place, done = letter.position, letter.replayed_to
            name = "" if place is None else f"{letter.topic}:{place.partition}:{place.offset}"
            text("strong", name, "isolated")
            text("span", letter.reason, "isolated")
            text("time", date_text(letter.written_time), "hint")
            if done is not None:
                text("span", f"Replayed to {letter.topic}:{done.partition}:{done.offset}.", "hint")
            elif place is not None:
                with box("div", "row") as rest:
                    look = partial(self._replay, letter, place, rest)
                    button("Replay", look, about=f"Look at a replay of {name}")

    async def _replay(self, letter: DeadLetter, place: StreamPosition, rest: Element) -> None:
        replay = partial(self.client.replay_dead_letter, letter.topic, place)
        with self._notice.failures():
            found = await replay(preview=True)
            if not found.left_out:
                once = f" As event {found.event_id} it counts once." if found.event_id else ""
                what = f"The record is written to {letter.topic} again, as it was.{once}"
                again = "If it is still unusable, it becomes a new dead letter."
                if not await confirmed([what, again], "Write it again"):
                    return
                # The gateway replays a record only once, so after a failed call the button can be pressed again.
                found = await replay()
            to, left_out = found.written_to, f"Left out: {found.left_out}."
            with refill(rest):
                done = left_out if to is None else f"Replayed to {letter.topic}:{to.partition}:{to.offset}."
                text("span", done, "isolated", role="status")


def _rate(part: PartHealth, report: HealthReport) -> float:
    """Calls a second in the last whole minute, or in the current minute if it is the first."""
    if len(part.calls) > 1:
        return part.calls[-2] / 60
    return part.calls[0] / max(1.0, report.last_minute_seconds) if part.calls else 0.0


def _shares(part: PartHealth) -> list[float]:
    """The percentage of failed and degraded calls in each minute."""
    columns = zip(part.calls, part.failed, part.degraded, strict=True)
    return [100.0 * min(1.0, (failed + degraded) / max(1, calls)) for calls, failed, degraded in columns]


def _state(part: PartHealth) -> str:
    return "not ready" if part.started else "not started"
