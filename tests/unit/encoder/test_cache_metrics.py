"""What incremental encoding saves is there to be scraped."""

from prometheus_client import CollectorRegistry

from services.algorithms.encoding.incremental_encoding import CacheCounts
from services.encoder.metrics import EncoderMetrics


def test_hits_misses_and_bytes_follow_the_adapter() -> None:
    registry = CollectorRegistry()
    held = CacheCounts()
    EncoderMetrics(registry).watch_cache(lambda: held)
    held = held.plus([0, 9, 3], [10, 10, 10], held_bytes=640)

    def value(name: str, outcome: str = "") -> float | None:
        return registry.get_sample_value(f"freshet_encoder_cache_{name}", {"outcome": outcome} if outcome else {})

    assert (value("sequences_total", "hit"), value("sequences_total", "miss")) == (2, 1)
    assert (value("events_total", "reused"), value("events_total", "encoded")) == (12, 18)
    assert value("bytes") == 640
