"""Reads a latency histogram from a process's Prometheus endpoint, and quantiles of what was added between two reads."""

import urllib.request
from collections.abc import Mapping

Buckets = dict[float, float]


def read_histogram(address: str, name: str, labels: Mapping[str, str]) -> Buckets:
    """Cumulative counts by upper bound (seconds) of one histogram at `address` (host:port); empty when it is absent.

    Raises: OSError when nobody answers there.
    """
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == name
        for sample in family.samples
        if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items()
    }


def quantile_ms(before: Buckets, after: Buckets, share: float) -> float | None:
    """The `share` quantile, in milliseconds, of what came between two reads; linear inside a bucket.

    None when nothing came, or when the quantile lies above the last finite bound.
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
