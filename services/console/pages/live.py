"""Live: the event rate, the events that wait, the index's lag, and the events themselves, while a tab is open."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from freshet_client import AsyncClient, FreshnessReport, TailedInteraction, TailedInteractions
from nicegui import ui

from services.console.frame import Visit, box, item_link, link, panel, text
from services.console.plots import Watch, draw, figure, shared
from services.console.sentences import MEANINGS, duration

T = TypeVar("T")

KEPT, EVERY_S, OVER = 120, 1.0, "two minutes"
# Lines of the tail, the most new ones of a second, the characters of a user id, and when an unseen tail ends.
LINES, MOST, SHORT, UNSEEN_S = 12, 5, 24, 3.0
AGAIN_S = 5.0  # from a stream's failure to the next one


@dataclass(frozen=True, slots=True)
class Sample:
    """The stream at one moment: events written and applied, the index's lag (None: no event yet), degradations."""

    at_s: float
    written: int
    applied: int
    index_lag_s: float | None
    degradations: Sequence[str] = ()

    @classmethod
    def of(cls, report: FreshnessReport, at_s: float) -> "Sample | None":
        """None if the end of the stream is unknown."""
        found = report.interactions
        if not found or any(one.end_offset < 0 for one in found):
            return None
        written, applied = sum(one.end_offset for one in found), sum(one.applied_offset + 1 for one in found)
        lag = None if report.candidates is None else report.candidates.lag_seconds
        return cls(at_s, written, applied, lag, report.degradations)


def rates(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Events written and applied a second, between consecutive samples."""
    steps = [(one, other, one.at_s - other.at_s) for other, one in pairwise(samples)]
    return [
        (max(0.0, (one.written - other.written) / took), max(0.0, (one.applied - other.applied) / took))
        for one, other, took in steps
    ]


class Samples:
    """Samples of the stream, the newest last."""

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._kept = client, deque[Sample](maxlen=KEPT)

    async def take(self) -> Sequence[Sample]:
        """Take one more, and return all. Raises: FreshetError."""
        sample = Sample.of(await self._client.freshness(), time.monotonic())
        self._kept += [] if sample is None else [sample]
        return list(self._kept)


class Tail:
    """The newest interactions, numbered from 1. It reads the gateway's stream while somebody looks."""

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._looked_s, self._again_s = client, 0.0, 0.0
        self._reading: asyncio.Future[None] | None = None
        self._lines: deque[tuple[int, TailedInteraction]] = deque(maxlen=LINES)
        self._num_lines = self.left_out = 0

    def look(self) -> Sequence[tuple[int, TailedInteraction]]:
        """Return them, oldest first. Raises: for five seconds, the error that ended the stream."""
        self._looked_s = time.monotonic()
        if self._reading is None or self._reading.done():
            if self._reading is not None and self._looked_s < self._again_s:
                self._reading.result()
            self._reading = _retrieved(asyncio.create_task(self._read()))
        return list(self._lines)

    async def _read(self) -> None:
        try:
            await self._read_stream()
        except Exception:
            self._again_s = time.monotonic() + AGAIN_S
            raise

    async def _read_stream(self) -> None:
        samples = self._client.tail()
        next_one = _retrieved(asyncio.ensure_future(anext(samples, None)))
        try:
            while time.monotonic() - self._looked_s < UNSEEN_S:
                if not (await asyncio.wait({next_one}, timeout=EVERY_S))[0]:
                    continue
                if (sample := next_one.result()) is None:
                    break
                self._take(sample)
                next_one = _retrieved(asyncio.ensure_future(anext(samples, None)))
        finally:
            next_one.cancel()

    def _take(self, sample: TailedInteractions) -> None:
        shown = sample.interactions[-MOST:]
        self.left_out += sample.left_out + len(sample.interactions) - len(shown)
        for one in shown:
            self._num_lines += 1
            self._lines.append((self._num_lines, one))


def _retrieved(future: asyncio.Future[T]) -> asyncio.Future[T]:
    """Else asyncio logs an error that nobody waits for, after the last tab is closed."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _watch(client: AsyncClient) -> Watch[Sequence[Sample]]:
    return Watch(Samples(client).take, EVERY_S)


class Live:
    def __init__(self, visit: Visit) -> None:
        self._watch, self._notice = shared(_watch, visit.client), visit.notice
        self._tail = shared(Tail, visit.client) if visit.has("operator", "support") else None
        self._shows_users, self._last, self._ticks = visit.has("support"), 0, 0
        self._said = text("p", "", "verdict")
        with box("div", "figures"):
            means = "written, and applied to the states of their users"
            self._rate, self._rates = figure("Events a second", means, KEPT, OVER, lines=2)
            self._waiting, self._waits = figure("Waiting", "events that are written and not applied yet", KEPT, OVER)
            means = "of the newest event, from its receipt on"
            self._lag, self._lags = figure("Until the index has it", means, KEPT, OVER)
        self._total = text("p", "", "hint")
        with panel("As they come"):
            self._events = box("ol", "plain")
            needs = "Interactions are shown to a key with the role operator or support."
            self._left_out = text("p", "" if self._tail is not None else needs, "hint")

    async def begin(self) -> None:
        await self._tick()
        ui.timer(EVERY_S, self._tick)

    async def _tick(self) -> None:
        with self._notice.failures():
            self._draw(await self._watch.look())
            if self._tail is not None:
                self._show(self._tail)

    def _show(self, tail: Tail) -> None:
        for number, one in tail.look():
            if number > self._last:
                self._last = number
                with self._events, box("li", "pair") as line:
                    user = link("/user", user=one.user_id) if self._shows_users else ""
                    text("a" if user else "span", one.user_id[:SHORT], "isolated", **({"href": user} if user else {}))
                    text("span", "takes an event back" if not one.item_id else one.type, "tag isolated")
                    if one.item_id:
                        item_link(one, "/items")
                line.move(target_index=0)
        for old in self._events.default_slot.children[LINES:]:
            old.delete()
        self._left_out.set_text(f"A sample: {tail.left_out:,} others since the first look.")

    def _draw(self, samples: Sequence[Sample]) -> None:
        if not samples:
            self._said.set_text("The stream cannot be asked where it ends.")
            return
        last, found = samples[-1], rates(samples)
        waits = [max(0, one.written - one.applied) for one in samples]
        well = "Every event that was written is applied." if not waits[-1] else f"{waits[-1]:,} events wait."
        words = ", ".join(MEANINGS.get(name, name) for name in last.degradations)
        self._said.set_text(f"Not as it should be: {words}." if words else well)
        self._said.classes(replace="verdict out" if words else "verdict")
        self._rate.set_text(f"{found[-1][0] if found else 0:,.0f}")
        self._waiting.set_text(f"{waits[-1]:,}")
        self._lag.set_text("–" if last.index_lag_s is None else _exact(last.index_lag_s))
        self._total.set_text(f"{last.written:,} events are in the stream. A sample a second, of the last two minutes.")
        # A plot costs more than all texts of the page.
        self._ticks += 1
        if self._ticks % 2:
            draw(self._rates, [[one for one, _ in found], [one for _, one in found]])
            draw(self._waits, [waits])
            draw(self._lags, [[one.index_lag_s or 0.0 for one in samples]])


def _exact(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else duration(seconds)
