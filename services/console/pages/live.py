"""Live: the event rate, the events that wait, and the index's lag, sampled each second while a tab is open."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

from freshet_client import AsyncClient, FreshnessReport
from nicegui import ui

from services.console.access import Access
from services.console.frame import Notice, Visit, add_page, box, text
from services.console.plots import Watch, draw, figure
from services.console.sentences import MEANINGS, duration

PATH = "/live"
KEPT, EVERY_S, _OVER = 120, 1.0, "two minutes"


@dataclass(frozen=True, slots=True)
class Sample:
    """The stream at one moment: how many events were written and applied, and what is degraded.

    `index_lag_s`: the age of the newest event in the index when the index began to serve it (None: no event yet).
    """

    at_s: float
    written: int
    applied: int
    index_lag_s: float | None
    degradations: Sequence[str] = ()

    @classmethod
    def of(cls, report: FreshnessReport, at_s: float) -> "Sample | None":
        """None if the end of the stream is unknown."""
        if not report.interactions or any(one.end_offset < 0 for one in report.interactions):
            return None
        return cls(
            at_s,
            sum(one.end_offset for one in report.interactions),
            sum(one.applied_offset + 1 for one in report.interactions),
            None if report.candidates is None else report.candidates.lag_seconds,
            report.degradations,
        )


def rates(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Events written and applied a second, between consecutive samples."""
    return [
        (
            max(0.0, (later.written - earlier.written) / (later.at_s - earlier.at_s)),
            max(0.0, (later.applied - earlier.applied) / (later.at_s - earlier.at_s)),
        )
        for earlier, later in pairwise(samples)
    ]


class Samples:
    """Samples of the stream, the newest last."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._kept: deque[Sample] = deque(maxlen=KEPT)

    async def take(self) -> Sequence[Sample]:
        """Take one more, and return all. Raises: FreshetError."""
        sample = Sample.of(await self._client.freshness(), time.monotonic())
        if sample is not None:
            self._kept.append(sample)
        return list(self._kept)


def add(access: Access) -> None:
    """Add the page."""
    # An entry lives while a page shows it.
    watches: WeakValueDictionary[AsyncClient, Watch[Sequence[Sample]]] = WeakValueDictionary()

    async def show(visit: Visit) -> None:
        page = Live(watches.setdefault(visit.client, Watch(Samples(visit.client).take, EVERY_S)), visit.notice)
        await page.tick()
        ui.timer(EVERY_S, page.tick)

    add_page(access, PATH, "Live", "Events as they come, and how soon they count.", show)


class Live:
    """One tab's page."""

    def __init__(self, watch: Watch[Sequence[Sample]], notice: Notice) -> None:
        self._watch, self._notice = watch, notice
        self._said = text("p", "", "verdict")
        with box("div", "figures"):
            self._rate, self._rates = figure(
                "Events a second", "written, and applied to the states of their users", KEPT, _OVER, lines=2
            )
            self._waiting, self._waits = figure("Waiting", "events that are written and not applied yet", KEPT, _OVER)
            self._lag, self._lags = figure(
                "Until the index has it", "of the newest event, from its receipt on", KEPT, _OVER
            )
        self._total = text("p", "", "hint")

    async def tick(self) -> None:
        """Fetch the samples and draw them."""
        with self._notice.failures():
            self._draw(await self._watch.look())

    def _draw(self, samples: Sequence[Sample]) -> None:
        if not samples:
            self._said.set_text("The stream cannot be asked where it ends.")
            return
        last, found = samples[-1], rates(samples)
        written = found[-1][0] if found else 0.0
        waiting = max(0, last.written - last.applied)
        lag = "–" if last.index_lag_s is None else _exact(last.index_lag_s)
        is_well = not last.degradations
        well = "Every event that was written is applied." if not waiting else f"{waiting:,} events wait."
        self._said.set_text(well if is_well else f"Not as it should be: {_words(last.degradations)}.")
        self._said.classes(replace="verdict" if is_well else "verdict out")
        self._rate.set_text(f"{written:,.0f}")
        self._waiting.set_text(f"{waiting:,}")
        self._lag.set_text(lag)
        self._total.set_text(f"{last.written:,} events are in the stream. A sample a second, of the last two minutes.")
        draw(self._rates, [[one for one, _ in found], [one for _, one in found]])
        draw(self._waits, [[max(0, one.written - one.applied) for one in samples]])
        draw(self._lags, [[one.index_lag_s or 0.0 for one in samples]])


def _exact(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else duration(seconds)


def _words(degradations: Sequence[str]) -> str:
    return ", ".join(MEANINGS.get(name, name) for name in degradations)
