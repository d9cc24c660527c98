"""The topic `exposures`: each record says which items an answer showed to whom.

The gateway writes the record after the answer. Interactions refer to the record by the exposure id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from freshet.v1 import common_pb2, events_pb2

from services.platform.errors import InvalidRequest
from services.platform.stream.records import parse, read_ms, set_ms
from services.platform.stream.topic import Topic
from services.platform.validation import validate_id

EXPOSURES = "exposures"
_DAY_MS = 24 * 3600 * 1000
TOPIC = Topic(name=EXPOSURES, settings={"retention.ms": str(90 * _DAY_MS)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """One answer.

    Columns of its n slots, best first: item_ids, scores, sources, propensities (n,); propensities are empty if each is
    1. surface: "recommend", "search" or "similar". shown_ms: Unix milliseconds. context: the request's context.
    absence_bucket: the query state's absence bucket. assignments: (experiment, arm, share) of the answer. teams (n,):
    in an interleaved answer, 0 for an item of the first arm, 1 of the second arm, 2 of both; else empty.
    rules_revision: the revision of the standing rules.
    """

    exposure_id: str
    shown_ms: int
    surface: str
    model_version: str
    index_version: str = ""
    text_version: str = ""
    first_position: int = 1
    item_ids: Sequence[str] = ()
    scores: Sequence[float] = ()
    sources: Sequence[str] = ()
    propensities: Sequence[float] = ()
    context: Mapping[str, str] = field(default_factory=dict)
    absence_bucket: int = 0
    assignments: Sequence[tuple[str, str, float]] = ()
    teams: Sequence[int] = ()
    rules_revision: int = 0


def assignment_message(assigned: tuple[str, str, float]) -> common_pb2.Assignment:
    experiment, arm, share = assigned
    return common_pb2.Assignment(experiment=experiment, arm=arm, share=share)


def encode_exposure(exposure: Exposure) -> bytes:
    """Return a record's value; its key is the pseudonym, or the exposure id."""
    number = {name: at for at, name in enumerate(dict.fromkeys(exposure.sources))}
    message = events_pb2.Exposure(
        exposure_id=exposure.exposure_id,
        surface=exposure.surface,
        model_version=exposure.model_version,
        index_version=exposure.index_version,
        text_version=exposure.text_version,
        first_position=exposure.first_position,
        item_ids=exposure.item_ids,
        scores=exposure.scores,
        source=[number[name] for name in exposure.sources] if len(number) > 1 else [0] * len(number),
        sources=number,
        propensity=exposure.propensities or [1.0],
        context=exposure.context,
        absence_bucket=exposure.absence_bucket,
        assignments=map(assignment_message, exposure.assignments),
        teams=exposure.teams,
        rules_revision=exposure.rules_revision,
    )
    set_ms(message.shown_time, exposure.shown_ms)
    return message.SerializeToString()


def decode_exposure(value: bytes | None) -> Exposure:
    message = parse(events_pb2.Exposure, value)
    validate_id("exposure_id", message.exposure_id)
    count = len(message.item_ids)
    columns = {"scores": count, "source": (1, count), "propensity": (1, count), "teams": (0, count)}
    for name, allowed in columns.items():
        found = len(getattr(message, name))
        if count and found not in (allowed if isinstance(allowed, tuple) else (allowed,)):
            raise InvalidRequest.of(name, f"{found} entries", f"as many as item_ids: {count}")
    if any(number >= len(message.sources) for number in message.source):
        raise InvalidRequest.of("source", max(message.source), f"below {len(message.sources)}")
    sources = [message.sources[number] for number in message.source]
    return Exposure(
        exposure_id=message.exposure_id,
        shown_ms=read_ms(message.shown_time, "shown_time"),
        surface=message.surface,
        model_version=message.model_version,
        index_version=message.index_version,
        text_version=message.text_version,
        first_position=message.first_position,
        item_ids=list(message.item_ids),
        scores=list(message.scores),
        sources=sources * count if len(sources) == 1 else sources,
        propensities=() if list(message.propensity) == [1.0] else list(message.propensity),
        context=dict(message.context),
        absence_bucket=message.absence_bucket,
        assignments=tuple((one.experiment, one.arm, one.share) for one in message.assignments),
        teams=tuple(message.teams),
        rules_revision=message.rules_revision,
    )
