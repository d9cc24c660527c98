"""The two lags of the freshness contract, read from the processes' own histograms.

Event to user state: the encoder's; event to index: of every process that serves item states. A process that is away,
or does not count the lag, has none.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.cli.scrape import Buckets, quantile_ms, read_histogram
from services.common.processes import PROCESSES

if TYPE_CHECKING:
    from services.cli.stack import Ports


class Lags:
    """Reads the histograms at `addresses` (name -> host:port and histogram), and quantiles since it was made."""

    def __init__(self, addresses: Mapping[str, tuple[str, str]], *, since_start: bool) -> None:
        self._addresses = addresses
        self._before: dict[str, Buckets] = {} if since_start else {name: self._buckets(name) for name in addresses}

    @classmethod
    def of(cls, ports: "Ports", *, since_start: bool) -> "Lags":
        """Those of a local stack; `since_start` counts from the processes' start, else from now."""
        found = {
            what: (ports.address(f"{row.name}-metrics"), histogram)
            for row in PROCESSES.values()
            for what, histogram in row.lag.items()
        }
        return cls(found, since_start=since_start)

    def read(self) -> dict[str, dict[str, Any] | None]:
        """Per lag: count, p50 and p99 in milliseconds (None where nothing came); None for a process that is away."""
        lags: dict[str, dict[str, Any] | None] = {}
        for name in self._addresses:
            after = self._buckets(name)
            before = self._before.get(name, {})
            if before and max(after.values(), default=0) < max(before.values()):
                before = self._before[name] = {}  # it restarted and counts from zero again
            count = round(max(after.values(), default=0) - max(before.values(), default=0))
            quantiles = {f"p{share}": quantile_ms(before, after, share / 100) for share in (50, 99)}
            lags[name] = {"count": count, **quantiles} if after else None
        return lags

    def _buckets(self, name: str) -> Buckets:
        address, metric = self._addresses[name]
        try:
            return read_histogram(address, metric, {})
        except OSError:
            return {}
