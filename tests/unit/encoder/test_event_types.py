"""What the stream does with events by what they were."""

from dataclasses import replace

import pytest
from fakes.encoder import MemoryOutbox, MemoryStream
from prometheus_client import CollectorRegistry
from streams import NOW_MS, VOCABULARY, append, drain, handler_on, interaction

from services.algorithms.bundles.event_schema import EventSchema
from services.contracts.topics.attributions import Attribution
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import Applied
from services.encoder.metrics import EncoderMetrics
from services.offline.backfill.memory_store import MemoryStore

TOOK = [{"item": 1}, {"item": 2}]


def streamed(*events: dict[str, object], vocabulary: Vocabulary = VOCABULARY) -> tuple[MemoryStore, MemoryOutbox]:
    stream, store, outbox = MemoryStream(1), MemoryStore(), MemoryOutbox()
    for number, event in enumerate(events):
        append(stream, interaction(0, **(event | {"event_id": f"e{number}"})))  # type: ignore[arg-type]
    drain(handler_on(store, outbox, vocabulary), stream)
    return store, outbox


def state_of(store: MemoryStore) -> bytes:
    return store.states["user-0", "model-1"].query_state.components


def attributed(outbox: MemoryOutbox) -> list[tuple[str, str]]:
    return [(one.item_id, one.type) for one in outbox.attributions if isinstance(one, Attribution)]


def test_what_was_shown_or_turned_down_leaves_the_state_as_it_is() -> None:
    wanted = state_of(streamed(*TOOK)[0])
    for kind, is_kept in (("dislike", True), ("impression", False), ("unheard of", False)):
        store, _ = streamed(*TOOK, {"item": 3, "type": kind})
        assert state_of(store) == wanted, kind
        events = store.load_users(["user-0"], store.epoch())["user-0"].events
        assert ([event.type for event in events] == ["click", "click", kind]) == is_kept
    for kind in ("click", "rating"):
        assert state_of(streamed(*TOOK, {"item": 3, "type": kind})[0]) != wanted, kind


@pytest.mark.parametrize(
    ("then", "turned_down"),
    [
        ([], ["item-3"]),
        ([{"item": 3, "type": "impression"}], ["item-3"]),
        ([{"item": 3, "event_time_ms": NOW_MS - 5_000}], ["item-3"]),
        ([{"item": 3, "event_time_ms": NOW_MS + 1}], []),
        ([{"item_id": "", "undoes_event_id": "e2"}], []),
        ([{"item": 1, "type": "rating", "value": 2.0, "event_time_ms": NOW_MS + 1}], ["item-1", "item-3"]),
        ([{"item": 1, "type": "rating", "value": 3.0, "event_time_ms": NOW_MS + 1}], ["item-3"]),
    ],
    ids=["dislike", "shown again", "taken before", "taken again", "undone", "rated low", "rated three"],
)
def test_an_item_is_turned_down_while_its_newest_event_speaks_against_it(
    then: list[dict[str, object]], turned_down: list[str]
) -> None:
    store, _ = streamed(*TOOK, {"item": 3, "type": "dislike"}, *then)
    assert sorted(store.turned_down["user-0"]) == turned_down


def test_the_refresher_hears_of_what_was_turned_down_and_not_of_what_was_shown() -> None:
    _, outbox = streamed({"item": 1}, {"item": 2, "type": "dislike"}, {"item": 3, "type": "impression"}, {"item": 4})
    assert attributed(outbox) == [("item-2", "dislike"), ("item-4", "click")]
    states = [one.state.components for one in outbox.attributions if isinstance(one, Attribution)]
    assert states[0] == states[1]


def test_a_bundle_may_say_that_a_type_is_taken() -> None:
    schema = EventSchema.parse(b"types: {click: {role: positive}, zap: {role: positive}}", "events.yaml")
    vocabulary = replace(VOCABULARY, schema=schema)
    store, outbox = streamed(*TOOK, {"item": 3, "type": "zap"}, vocabulary=vocabulary)
    assert state_of(store) == state_of(streamed(*TOOK, {"item": 3})[0])
    assert attributed(outbox) == [("item-2", "click"), ("item-3", "zap")]


def test_types_that_the_schema_does_not_name_are_counted_by_name() -> None:
    stream, store = MemoryStream(1), MemoryStore()
    for number, kind in enumerate(["click", "zap", "zap", "impression", "zip"]):
        append(stream, interaction(0, item=number, type=kind, event_id=f"e{number}"))
    append(stream, interaction(0, item=1, type="zap", event_id="e1"))  # a duplicate
    handler = handler_on(store, MemoryOutbox())
    handler.resync(stream)
    applied = handler.apply(stream.poll(0, 100))
    assert applied.unknown_types == {"zap": 2, "zip": 1}
    assert applied.counts["kept_out"] == 4


def test_metrics_name_the_first_unknown_types_alone() -> None:
    registry = CollectorRegistry()
    metrics = EncoderMetrics(registry)
    for number in range(30):
        applied = Applied()
        applied.unknown_types[f"type-{number}"] = 2
        metrics.batch(1, 0.0, applied, ())
    (family,) = [one for one in registry.collect() if one.name == "freshet_encoder_unknown_types"]
    found = {one.labels["type"]: one.value for one in family.samples if one.name.endswith("_total")}
    assert found == {**{f"type-{number}": 2.0 for number in range(20)}, "(others)": 20.0}
