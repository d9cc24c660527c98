"""The topic `version-sets`: one complete record per operation.

`freshet model` writes it; gateways and encoders read it in full.
"""

from dataclasses import asdict

from freshet.v1 import events_pb2

from services.contracts.operations import Operation, OperationTopic, operation_of, set_operation
from services.contracts.version_sets import Share, VersionSet, VersionSets
from services.platform.errors import InvalidRequest
from services.platform.stream.records import parse

VERSION_SETS = "version-sets"


def set_message(version_set: VersionSet) -> events_pb2.VersionSet:
    return events_pb2.VersionSet(**asdict(version_set))


def share_message(share: Share | None) -> events_pb2.SetShare | None:
    return None if share is None else events_pb2.SetShare(name=share.name, share=share.share)


def encode_operation(made: Operation[VersionSets]) -> bytes:
    after = made.after
    message = events_pb2.VersionSets(
        sets=[set_message(version_set) for version_set in after.sets.values()],
        serving=after.serving,
        before=after.before,
        canary=share_message(after.canary),
        shadow=share_message(after.shadow),
        salt=after.salt,
    )
    set_operation(message, made)
    value: bytes = message.SerializeToString()
    return value


def decode_operation(value: bytes | None) -> Operation[VersionSets]:
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
    return operation_of(message, after)


def _share(named: str, message: events_pb2.VersionSets) -> Share:
    found = getattr(message, named)
    if not 0 < found.share <= 1:
        raise InvalidRequest.of(f"{named}.share", found.share, "above 0, at most 1")
    return Share(name=found.name, share=found.share)


OPERATIONS = OperationTopic(name=VERSION_SETS, encode=encode_operation, decode=decode_operation)
TOPIC = OPERATIONS.topic
