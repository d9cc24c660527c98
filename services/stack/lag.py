"""Reads two lags from the processes' histograms: from event to user state (encoder), and from event to index."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.contracts.processes import PROCESSES
from services.platform.config import environment_tls

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

    from services.stack import Ports
import urllib.request

Buckets = dict[float, float]


def read_samples(address: str) -> "list[Sample]":
    """Return every sample at `address`. Raises: OSError if it does not answer."""
    from prometheus_client.parser import text_string_to_metric_families

    tls = environment_tls()
    url = f"{'https' if tls else 'http'}://{address}/metrics"
    with urllib.request.urlopen(url, timeout=5, context=tls.client_context() if tls else None) as answer:
        text = answer.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def read_histogram(address: str, name: str, labels: Mapping[str, str]) -> Buckets:
    """Return a histogram's cumulative counts by upper bound (seconds), or {} if it is absent. Raises: OSError."""
    return {
        float(sample.labels["le"]): sample.value
        for sample in read_samples(address)
        if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items()
    }


def quantile_ms(before: Buckets, after: Buckets, share: float) -> float | None:
    """Return a quantile (ms) of the values between two reads, linear inside a bucket.

    None without values, or above the last finite bound.
    """
    bounds = sorted(after)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    wanted = share * counts[-1]
    lower, below = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= wanted:
            if bound == float("inf"):
                return None
            inside = (wanted - below) / (count - below) if count > below else 1.0
            return round((lower + (bound - lower) * inside) * 1000, 3)
        lower, below = bound, count
    return None


class Lags:
    """Reads lags since the processes' start or since this object's creation.

    `addresses` maps each lag's name to host:port and the name of the histogram.
    """

    def __init__(self, addresses: Mapping[str, tuple[str, str]], *, since_start: bool) -> None:
        self._addresses = addresses
        self._before: dict[str, Buckets] = {} if since_start else {name: self._buckets(name) for name in addresses}

    @classmethod
    def of(cls, ports: "Ports", *, since_start: bool) -> "Lags":
        """Return a local stack's lags."""
        found = {
            what: (ports.address(f"{row.name}-metrics"), histogram)
            for row in PROCESSES.values()
            for what, histogram in row.lag.items()
        }
        return cls(found, since_start=since_start)

    def read(self) -> dict[str, dict[str, Any] | None]:
        """Return each lag's count, and p50 and p99 in milliseconds, or None if its process is unavailable."""
        lags: dict[str, dict[str, Any] | None] = {}
        for name in self._addresses:
            after = self._buckets(name)
            before = self._before.get(name, {})
            if before and max(after.values(), default=0) < max(before.values()):
                before = self._before[name] = {}  # the process restarted and counts from zero
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
