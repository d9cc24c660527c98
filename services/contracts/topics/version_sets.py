"""The topic `version-sets`: which models there are and what each answers, one whole record per operation.

`freshet model` writes it; gateways and encoders read it whole. A record counts if its revision is one more than that of
the last one that counted, so of two operators at once the first one's does, for every reader alike; that is why nothing
of it is ever compacted. It holds a few records a week.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from freshet.v1 import events_pb2

from services.contracts.version_sets import Share, VersionSet, VersionSets
from services.platform.errors import FreshetError, InvalidRequest
from services.platform.stream.record import SourceRecord
from services.platform.stream.times import read_ms, set_ms
from services.platform.stream.topic import FOREVER, Topic, parse

VERSION_SETS = "version-sets"
TOPIC = Topic(name=VERSION_SETS, num_partitions=1, settings=FOREVER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """What an operator did, and the sets afterwards. time_ms: Unix milliseconds."""

    after: VersionSets
    operation: str
    operator: str
    operation_id: str
    time_ms: int


def set_message(held: VersionSet) -> events_pb2.VersionSet:
    """A set as records and answers have it."""
    return events_pb2.VersionSet(
        name=held.name,
        model_version=held.model_version,
        bundle=held.bundle,
        candidates=held.candidates,
        reranker=held.reranker,
        refreshers=held.refreshers,
        generator=held.generator,
    )


def share_message(share: Share | None) -> events_pb2.SetShare | None:
    """A share as records and answers have it; None for none."""
    return None if share is None else events_pb2.SetShare(name=share.name, share=share.share)


def encode_operation(made: Operation) -> bytes:
    """The value of a record; it has no key."""
    after = made.after
    message = events_pb2.VersionSets(
        revision=after.revision,
        sets=[set_message(held) for held in after.sets.values()],
        serving=after.serving,
        before=after.before,
        canary=share_message(after.canary),
        shadow=share_message(after.shadow),
        salt=after.salt,
        operation=made.operation,
        operator=made.operator,
        operation_id=made.operation_id,
    )
    set_ms(message.time, made.time_ms)
    value: bytes = message.SerializeToString()
    return value


def decode_operation(value: bytes | None) -> Operation:
    """Read and check a record. Raises: InvalidRequest naming the field."""
    message = parse(events_pb2.VersionSets, value)
    sets = {
        one.name: VersionSet(
            name=one.name,
            model_version=one.model_version,
            bundle=one.bundle,
            candidates=one.candidates,
            reranker=one.reranker,
            refreshers=tuple(one.refreshers),
            generator=one.generator,
        )
        for one in message.sets
    }
    if len(sets) != len(message.sets):
        raise InvalidRequest.of("sets", [one.name for one in message.sets], "each name once")
    for named in ("serving", "before", "canary", "shadow"):
        found = getattr(message, named)
        name = found if isinstance(found, str) else found.name
        is_named = name or named == "serving" or (not isinstance(found, str) and message.HasField(named))
        if name not in sets and is_named:
            raise InvalidRequest.of(named, name, f"one of {', '.join(sets) or 'no sets'}")
    after = VersionSets(
        revision=message.revision,
        sets=sets,
        serving=message.serving,
        before=message.before,
        canary=_share("canary", message) if message.HasField("canary") else None,
        shadow=_share("shadow", message) if message.HasField("shadow") else None,
        salt=message.salt,
    )
    return Operation(
        after=after,
        operation=message.operation,
        operator=message.operator,
        operation_id=message.operation_id,
        time_ms=read_ms(message.time, "time"),
    )


def _share(named: str, message: events_pb2.VersionSets) -> Share:
    found = getattr(message, named)
    if not 0 < found.share <= 1:
        raise InvalidRequest.of(f"{named}.share", found.share, "above 0, at most 1")
    return Share(name=found.name, share=found.share)


@dataclass(slots=True)
class Counted:
    """What counts of the records read so far, in order, and how many did not count, or could not be read."""

    operations: list[Operation] = field(default_factory=list)
    void: int = 0

    @property
    def last(self) -> Operation | None:
        """None: there was none."""
        return self.operations[-1] if self.operations else None

    def take(self, records: Iterable[SourceRecord]) -> bool:
        """Read on; True when the sets changed."""
        before = self.last
        for record in records:
            try:
                made = decode_operation(record.value)
            except FreshetError:
                self.void += 1
                continue
            if made.after.revision == (0 if self.last is None else self.last.after.revision) + 1:
                self.operations.append(made)
            else:
                self.void += 1
        return self.last is not before
