"""Version sets: their models, the assignment of users, and operations on them.

A set is a bundle and its processes. The state is one value; each operation returns the next state or raises. `freshet
model` writes one complete record per operation to the topic `version-sets`; gateways and encoders read it in full.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from freshet.v1 import events_pb2

from services.contracts.operations import Operation, OperationTopic, Revised, operation_of, set_operation
from services.platform.errors import InvalidRequest, NotFound, PreconditionFailed
from services.platform.stream.records import parse

# Each set takes memory.
MAX_SETS = 2
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_BITS = 53  # of a double's mantissa


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSet:
    """A model and its processes. bundle: a path valid in every process that loads it.

    Addresses are host:port; "" means the address in the gateway's settings.
    """

    name: str
    model_version: str
    bundle: str
    candidates: str = ""
    reranker: str = ""
    refreshers: tuple[str, ...] = ()
    generator: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A share of users or requests, above 0 and at most 1."""

    name: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSets(Revised):
    """All sets. before: the set before the last promotion, or "". salt: salt of the hash that chooses canary users."""

    sets: Mapping[str, VersionSet]
    serving: str
    before: str = ""
    canary: Share | None = None
    shadow: Share | None = None
    salt: str = ""

    @classmethod
    def of_one(cls, serving: VersionSet) -> "VersionSets":
        """Return the initial state: the configured processes."""
        return cls(revision=0, sets={serving.name: serving}, serving=serving.name)

    def find(self, name: str) -> VersionSet:
        """Return a set. Raises: NotFound with the existing names."""
        if name not in self.sets:
            raise NotFound(f"set={name!r} allowed: {', '.join(sorted(self.sets))}")
        return self.sets[name]

    def set_for(self, user_id: str) -> str:
        """Return the user's set; for user "" the serving set."""
        if self.canary is None or not user_id:
            return self.serving
        return self.canary.name if position_of(user_id, self.salt) < self.canary.share else self.serving

    def staged(self, new: VersionSet) -> "VersionSets":
        """Add a set. Raises: InvalidRequest, PreconditionFailed."""
        if not _NAME.fullmatch(new.name):
            raise InvalidRequest.of("name", new.name, "1-64 of a-z, 0-9 and '-', no '-' first")
        if new.name in self.sets:
            raise PreconditionFailed(f"set {new.name!r} is staged already: retire it first, or take another name")
        for other in self.sets.values():
            if other.model_version == new.model_version:
                raise PreconditionFailed(f"model {new.model_version} is set {other.name!r} already")
        if len(self.sets) >= MAX_SETS:
            others = ", ".join(sorted(self.sets.keys() - {self.serving}))
            raise PreconditionFailed(f"there are {len(self.sets)} sets, allowed: {MAX_SETS}; retire {others} first")
        return self._next(sets={**self.sets, new.name: new})

    def shadowed(self, name: str, share: float) -> "VersionSets":
        """Mirror this share of requests; 0 ends it.

        Raises: NotFound, InvalidRequest, PreconditionFailed.
        """
        return self._next(shadow=self._share_of(name, share))

    def canaried(self, name: str, share: float, salt: str) -> "VersionSets":
        """Serve this share of users; 0 ends it. If the set stays, the salt stays too, so a new share moves the fewest
        users. Raises: what `shadowed` raises.
        """
        chosen = self._share_of(name, share)
        goes_on = self.canary is not None and self.canary.name == name
        return self._next(canary=chosen, salt=self.salt if goes_on else salt)

    def promoted(self, name: str) -> "VersionSets":
        """Serve all users; the previous set stays. Raises: NotFound, PreconditionFailed."""
        self.find(name)
        if name == self.serving:
            raise PreconditionFailed(f"set {name!r} serves already")
        return self._next(serving=name, before=self.serving, canary=None, shadow=None)

    def rolled_back(self) -> "VersionSets":
        """Remove the canary; without one, serve the previous set. Raises: PreconditionFailed."""
        if self.canary is not None:
            return self._next(canary=None)
        if not self.before:
            raise PreconditionFailed(f"set {self.serving!r} has no predecessor to go back to")
        return self._next(serving=self.before, before="", shadow=None)

    def retired(self, name: str) -> "VersionSets":
        """Remove a set. Raises: NotFound, PreconditionFailed if it serves or has users."""
        self.find(name)
        if name == self.serving:
            raise PreconditionFailed(f"set {name!r} serves: promote another one, or roll back, first")
        if self.canary is not None:
            raise PreconditionFailed(f"set {name!r} answers {self.canary.share:.3%} of users: end the canary first")
        left = {other: version_set for other, version_set in self.sets.items() if other != name}
        return self._next(sets=left, before="" if self.before == name else self.before, shadow=None)

    def settled(self) -> "VersionSets":
        """Move the only set to the configured processes. Raises: PreconditionFailed if there are two."""
        if len(self.sets) > 1:
            raise PreconditionFailed(f"there are {len(self.sets)} sets, allowed: 1")
        own = replace(self.sets[self.serving], candidates="", reranker="", refreshers=(), generator="")
        return self._next(sets={own.name: own})

    def _share_of(self, name: str, share: float) -> Share | None:
        self.find(name)
        if not 0 <= share <= 1:
            raise InvalidRequest.of("share", share, "0 to 1 (0 % to 100 %)")
        if name == self.serving:
            raise PreconditionFailed(f"set {name!r} serves: it answers everybody already")
        return Share(name=name, share=share) if share else None

    def _next(self, **changes: object) -> "VersionSets":
        return replace(self, revision=self.revision + 1, **changes)  # type: ignore[arg-type]


def position_of(user_id: str, salt: str) -> float:
    """Return a position in [0, 1): uniform over users, independent for each salt."""
    digest = hashlib.blake2b(user_id.encode(), key=salt.encode()[:64], digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / 2.0**_BITS


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
    return message.SerializeToString()


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
