"""Live: the event rate, the events that wait, the index's lag, and the events themselves, while a tab is open."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from freshet_client import AsyncClient, TailedInteraction, TailedInteractions
from nicegui import ui

from services.console.elements import box, handle, item_link, link, panel, text
from services.console.frame import Page
from services.console.plots import Figures, Watch, shared
from services.console.sentences import MEANINGS, duration

KEPT, EVERY_S = 120, 1.0
# Lines of the tail, the largest number of new ones a second, and the shown characters of a user id.
LINES, MOST, SHORT = 12, 5, 24
# When a tail that nobody looks at ends, and the time from a stream's failure to the next attempt.
UNSEEN_S, AGAIN_S = 3.0, 5.0
FIGURES = (
    ("Events a second", "written, and applied to the states of their users", 2),
    ("Waiting", "events that are written and not applied yet", 1),
    ("Until the index has it", "of the newest event, from its receipt on", 1),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The stream at one moment: events written and applied, the index's lag (None: no event yet), degradations."""

    at_s: float
    written: int
    applied: int
    index_lag_s: float | None
    degradations: Sequence[str] = ()

    @classmethod
    async def take(cls, client: AsyncClient) -> "Sample | None":
        """Return a new sample, None if the end of the stream is unknown. Raises: FreshetError."""
        report = await client.freshness()
        found = report.interactions
        if not found or any(one.end_offset < 0 for one in found):
            return None
        written, applied = sum(one.end_offset for one in found), sum(one.applied_offset + 1 for one in found)
        lag = None if report.candidates is None else report.candidates.lag_seconds
        return cls(time.monotonic(), written, applied, lag, report.degradations)


def rates(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Events written and applied a second, between consecutive samples."""
    steps = [(one, other, one.at_s - other.at_s) for other, one in pairwise(samples)]
    return [
        (max(0.0, (one.written - other.written) / took), max(0.0, (one.applied - other.applied) / took))
        for one, other, took in steps
    ]


class Tail:
    """Reads the gateway's stream while somebody looks; has the newest interactions, numbered from 1."""

    def __init__(self, client: AsyncClient) -> None:
        self.client, self._again_s = client, 0.0
        self._reading: asyncio.Task[None] | None = None
        self._unseen: asyncio.TimerHandle | None = None
        self._lines: deque[tuple[int, TailedInteraction]] = deque(maxlen=LINES)
        self._num_lines = self.left_out = 0

    def look(self) -> Sequence[tuple[int, TailedInteraction]]:
        """Return the interactions, oldest first. Raises: for five seconds, the error that ended the stream."""
        if self._reading is None or self._reading.done():
            if self._reading is not None and time.monotonic() < self._again_s:
                self._reading.result()
            self._reading = asyncio.create_task(self._read())
            # Retrieve the error, because asyncio logs an unretrieved one after the last tab is closed.
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._unseen is not None:
            self._unseen.cancel()
        self._unseen = asyncio.get_running_loop().call_later(UNSEEN_S, self._reading.cancel)
        return list(self._lines)

    async def _read(self) -> None:
        try:
            async for sample in self.client.tail():
                self._take(sample)
        except Exception:
            self._again_s = time.monotonic() + AGAIN_S
            raise

    def _take(self, sample: TailedInteractions) -> None:
        shown = sample.interactions[-MOST:]
        self.left_out += sample.left_out + len(sample.interactions) - len(shown)
        for one in shown:
            self._num_lines += 1
            self._lines.append((self._num_lines, one))


def _watch(client: AsyncClient) -> Watch[Sample | None]:
    return Watch(partial(Sample.take, client), EVERY_S, KEPT)


class Live(Page):
    async def show(self) -> None:
        self._watch = shared(_watch, self.client)
        self._tail = shared(Tail, self.client) if self.has("operator", "support") else None
        self._shows_users, self._last, self._ticks = self.has("support"), 0, 0
        self._said = text("p", "", "verdict")
        self._figures = Figures(FIGURES, KEPT, "two minutes")
        self._total = text("p", "", "hint")
        with panel("As they come"):
            self._events = box("ol", "plain")
            needs = "Interactions are shown to a key with the role operator or support."
            self._left_out = text("p", "" if self._tail is not None else needs, "hint")
        await handle(self._tick)
        ui.timer(EVERY_S, partial(handle, self._tick))

    async def _tick(self) -> None:
        self._draw([one for one in await self._watch.look() if one is not None])
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
        self._total.set_text(f"{last.written:,} events are in the stream. A sample a second, of the last two minutes.")
        lag = "–" if last.index_lag_s is None else _exact(last.index_lag_s)
        self._ticks += 1
        self._figures.show(
            [
                (f"{found[-1][0] if found else 0:,.0f}", [[one for one, _ in found], [one for _, one in found]]),
                (f"{waits[-1]:,}", [waits]),
                (lag, [[one.index_lag_s or 0.0 for one in samples]]),
            ],
            draws=self._ticks % 2 == 1,
        )


def _exact(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else duration(seconds)
