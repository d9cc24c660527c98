"""The meaning of each event type: `events.yaml` of a bundle.

By default a type's role decides whether the item counts as seen, whether the history has the event, and the event's
PEFA weight. The file can override each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml

from services.algorithms.pefa.policy import FeedbackPolicy, TypeWeight

EVENTS_YAML = "events.yaml"
DEFAULT_EVENTS = Path(__file__).with_name(EVENTS_YAML)
MAX_TYPES = 256
MAX_BYTES = 64 << 10
# How many of the newest events are searched for rejected items.
TURNED_DOWN_EVENTS = 100


class SchemaError(ValueError):
    """An unreadable event schema; the message has file, type, field and allowed values."""


class Role(StrEnum):
    POSITIVE = "positive"
    NEGATIVE = "negative"
    EXPOSURE = "exposure"
    NEUTRAL = "neutral"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventType:
    """One type: whether its item counts as seen, whether the history has the event, and its PEFA weight."""

    role: Role
    seen: bool
    history: bool
    weight: TypeWeight

    def __post_init__(self) -> None:
        if self.history and not self.seen:
            raise ValueError("seen=false with history=true; allowed: what is in a history counts as seen")
        if self.role is Role.EXPOSURE and (self.history or self.weight.slope):
            raise ValueError("history or weight of an exposure; allowed: neither, it was shown and not taken")

    @property
    def is_encoded(self) -> bool:
        """Whether an encoder without `actions` reads the event. Such an encoder cannot tell types apart, so it gets no
        negative events.
        """
        return self.history and self.role is not Role.NEGATIVE

    @property
    def is_attributed(self) -> bool:
        """Whether the refresher gets the event. A type that is neutral here can have a weight in the refresher's
        policy.
        """
        return self.role is not Role.EXPOSURE


# By default, the item of an event with a weight counts as seen, and the history has the event.
_WEIGHT = {Role.POSITIVE: 1.0, Role.NEGATIVE: -1.0, Role.EXPOSURE: 0.0, Role.NEUTRAL: 0.0}
_FIELDS = {"role": str, "seen": bool, "history": bool, "weight": float, "centre": float, "limit": float}


@dataclass(frozen=True, kw_only=True)
class EventSchema:
    """Event types by name; `other` is for all other types."""

    types: Mapping[str, EventType]
    other: EventType

    def of(self, name: str) -> EventType:
        return self.types.get(name, self.other)

    def speaks_for(self, name: str, value: float) -> bool:
        """Whether the event is positive; with a centre, its weight must also be above 0."""
        means = self.of(name)
        return means.role is Role.POSITIVE and (means.weight.centre is None or self.feedback.weight(name, value) > 0)

    def weight_for(self, name: str, value: float) -> float:
        return max(0.0, self.feedback.weight(name, value)) if self.of(name).role is Role.POSITIVE else 0.0

    @cached_property
    def can_speak_against(self) -> frozenset[str]:
        """Types of the schema whose events can have a negative weight."""
        return frozenset(
            name for name, one in self.types.items() if one.weight.centre is not None or one.weight.slope < 0
        )

    def speaks_against(self, name: str, value: float) -> bool:
        """Whether the schema names the event's type and the event has a negative weight."""
        return name in self.can_speak_against and self.feedback.weight(name, value) < 0

    def turned_down(self, events: Sequence[tuple[str, tuple[str, float]]]) -> list[str]:
        """Items whose newest history event has a negative weight. events: (item id, (type, value)), oldest first."""
        kept = {kind for kind in {kind for _, kind in events} if self.of(kind[0]).history}
        against = {kind for kind in kept if self.speaks_against(*kind)}
        newest = {item_id: kind for item_id, kind in events if kind in kept} if against else {}
        return [item_id for item_id, kind in newest.items() if kind in against]

    @cached_property
    def feedback(self) -> FeedbackPolicy:
        weights = {name: one.weight for name, one in self.types.items()}
        return FeedbackPolicy(MappingProxyType(weights), self.other.weight)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a schema file. Raises: SchemaError."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise SchemaError(f"{path}: {error.strerror}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, source: str) -> Self:
        """Parse a schema. Raises: SchemaError with `source`."""
        if len(text) > MAX_BYTES:
            raise SchemaError(f"{source} holds {len(text)} bytes; allowed: at most {MAX_BYTES}")
        try:
            raw = yaml.load(text, _OnceLoader)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise SchemaError(f"{source}: {' '.join(str(error).split())}") from error
        if not isinstance(raw, dict) or not set(raw) <= {"types", "default"} or not isinstance(raw.get("types"), dict):
            found = sorted(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
            raise SchemaError(f"{source} holds {found}; allowed: types, a mapping of names, and default")
        if len(raw["types"]) > MAX_TYPES:
            raise SchemaError(f"{source}: {len(raw['types'])} types; allowed: at most {MAX_TYPES}")
        types = {_name(source, name): _event_type(f"{source}: {name}", one) for name, one in raw["types"].items()}
        other = _event_type(f"{source}: default", raw.get("default", {"role": Role.NEUTRAL.value}))
        return cls(types=MappingProxyType(types), other=other)


@cache
def default_schema() -> EventSchema:
    """The default schema, `services/algorithms/bundles/events.yaml`."""
    return EventSchema.read(DEFAULT_EVENTS)


class _OnceLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(problem=f"{twice[0]} stands twice; allowed: once")
        return super().construct_mapping(node, deep=deep)


def _name(source: str, name: object) -> str:
    if not isinstance(name, str) or not name or len(name.encode()) > 64 or not name.isprintable():
        raise SchemaError(f"{source}: type {name!r:.80}; allowed: text of 1 to 64 bytes")
    return name


def _event_type(where: str, declared: object) -> EventType:
    if not isinstance(declared, dict):
        raise SchemaError(f"{where} is {declared!r:.80}; allowed: a mapping with role")
    for name, value in declared.items():
        wanted = _FIELDS.get(name)
        if wanted is None:
            raise SchemaError(f"{where}.{name}; allowed: {', '.join(_FIELDS)}")
        fits = type(value) in (int, float) and math.isfinite(value) if wanted is float else type(value) is wanted
        if not fits:
            allowed = {str: "text", bool: "true or false", float: "a finite number"}[wanted]
            raise SchemaError(f"{where}.{name}={value!r:.80}; allowed: {allowed}")
    try:
        role = Role(declared.get("role", ""))
    except ValueError:
        raise SchemaError(f"{where}.role={declared.get('role')!r:.80}; allowed: {', '.join(Role)}") from None
    slope = float(declared.get("weight", _WEIGHT[role]))
    centre = float(declared["centre"]) if "centre" in declared else None
    if role is Role.NEGATIVE and slope > 0:
        raise SchemaError(f"{where}.weight={slope}; allowed: at most 0 for a negative event")
    if role is Role.POSITIVE and centre is None and slope < 0:
        raise SchemaError(f"{where}.weight={slope}; allowed: at least 0 for a positive event, or a centre")
    limit = float(declared.get("limit", max(1.0, abs(slope)) if centre is None else 1.0))
    try:
        return EventType(
            role=role,
            seen=declared.get("seen", _WEIGHT[role] != 0),
            history=declared.get("history", _WEIGHT[role] != 0),
            weight=TypeWeight(slope=slope, centre=centre, limit=limit),
        )
    except ValueError as error:
        raise SchemaError(f"{where}: {error}") from None
