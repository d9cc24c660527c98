"""Experiments: their arms, the assignment of users, and operations on them.

The arm is a pure function of the experiments, the request's context and the user's or visitor's id. The state is one
value; each operation returns the next state or raises. `freshet experiments` writes one record with the whole state per
operation to the topic `experiments`; gateways and `freshet results` read it in full.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from freshet.v1 import events_pb2

from services.algorithms.rules.ranking_rules import Rule
from services.contracts.operations import Operation, OperationTopic, Revised, operation_of, set_operation
from services.contracts.topics.version_sets import position_of
from services.contracts.wire import rule_message, rules_of
from services.platform.errors import InvalidRequest, NotFound, PreconditionFailed
from services.platform.stream.records import parse, read_ms, set_ms
from services.platform.validation import validate_text

# The share of all users of a layer.
_WHOLE = 1.0
MAX_EXPERIMENTS, MAX_ARMS, MAX_RULES = 64, 8, 8
# The context's entry that identifies a visitor.
VISITOR = "visitor"
# The context's `surface` in the console's requests; results do not count them.
CONSOLE = "console"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_ROUNDING = 1e-9
# Settings that a request may also have.
_SETTINGS = ("version_set", "rules", "diversity", "max_per_category", "new_item_share", "max_gap")


class State(IntEnum):
    """Numbered as in `freshet.v1.Experiment.State`."""

    CREATED = 1
    RUNNING = 2
    STOPPED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """See `freshet.v1.Arm`."""

    name: str
    share: float
    version_set: str = ""
    rules: tuple[Rule, ...] = ()
    diversity: float = 0.0
    max_per_category: int = 0
    new_item_share: float | None = None
    max_gap: float | None = None

    @property
    def has_settings(self) -> bool:
        """Whether the arm changes fields of requests. A version set alone does not."""
        return bool(self.rules or self.diversity or self.max_per_category) or (
            self.new_item_share is not None or self.max_gap is not None
        )


_DEFAULTS = Arm(name="", share=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """See `freshet.v1.Experiment`. Times are Unix milliseconds, 0 for none."""

    name: str
    arms: tuple[Arm, ...]
    layer: str = "default"
    first: float = 0.0
    share: float = 1.0
    context: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    salt: str = ""
    state: State = State.CREATED
    started_ms: int = 0
    stopped_ms: int = 0

    @property
    def control(self) -> Arm:
        return self.arms[0]

    @property
    def settings(self) -> set[str]:
        return {name for name in _SETTINGS for arm in self.arms if getattr(arm, name) != getattr(_DEFAULTS, name)}

    def takes(self, who: str, context: Mapping[str, str]) -> bool:
        if any(context.get(name) != value for name, value in self.context.items()):
            return False
        return self.first <= position_of(who, self.layer) < self.first + self.share

    def arm_of(self, who: str) -> Arm:
        position, end = position_of(who, self.salt), 0.0
        for arm in self.arms:
            end += arm.share
            if position < end:
                return arm
        return self.arms[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A user's arm; None if arms are interleaved. is_forced: a tester chose it; results do not count the answer."""

    experiment: Experiment
    arm: Arm | None
    is_forced: bool = False

    @property
    def share(self) -> float:
        """The probability of this arm; 0 if forced."""
        if self.is_forced:
            return 0.0
        return 1.0 if self.arm is None else self.arm.share


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiments(Revised):
    """All experiments by name."""

    experiments: Mapping[str, Experiment] = field(default_factory=dict)

    @property
    def running(self) -> Iterator[Experiment]:
        return (one for one in self.experiments.values() if one.state is State.RUNNING)

    def find(self, name: str) -> Experiment:
        """Return an experiment. Raises: NotFound with the existing names."""
        if name not in self.experiments:
            raise NotFound(f"experiment={name!r} allowed: {', '.join(sorted(self.experiments)) or 'none was created'}")
        return self.experiments[name]

    def assigned(
        self, user_id: str, context: Mapping[str, str], forced: Mapping[str, str] | None = None
    ) -> tuple[Assignment, ...]:
        """Return a request's arms, in the experiments' order. forced: experiment -> the arm that a tester chose.

        Raises: InvalidRequest for a forced experiment that is not running, or an unknown arm.
        """
        who = user_id or context.get(VISITOR, "")
        found = [] if not who else [one for one in self.running if one.takes(who, context)]
        chosen = {
            one.name: Assignment(experiment=one, arm=None if one.interleaved else one.arm_of(who)) for one in found
        }
        for name, arm in (forced or {}).items():
            running = {one.name: one for one in self.running}
            if name not in running:
                raise InvalidRequest.of(
                    "arms", name, f"a running experiment: {', '.join(sorted(running)) or 'none runs'}"
                )
            arms = {one.name: one for one in running[name].arms}
            if arm not in arms:
                raise InvalidRequest.of(f"arms[{name!r}]", arm, f"one of {', '.join(arms)}")
            chosen[name] = Assignment(experiment=running[name], arm=arms[arm], is_forced=True)
        return tuple(chosen.values())

    def created(self, new: Experiment) -> "Experiments":
        """Add an experiment with the layer's first free share. Raises: InvalidRequest, PreconditionFailed."""
        check(new)
        if new.name in self.experiments:
            raise PreconditionFailed(f"experiment {new.name!r} exists: take another name; a result belongs to one name")
        if len(self.experiments) >= MAX_EXPERIMENTS:
            raise PreconditionFailed(
                f"there are {MAX_EXPERIMENTS} experiments, the most allowed: remove stopped ones first"
            )
        return self._with(replace(new, first=self._free(new), state=State.CREATED))

    def started(self, name: str, now_ms: int) -> "Experiments":
        """Start an experiment. Raises: NotFound; PreconditionFailed if it ran before, or if a running experiment of
        another layer sets one of the same settings other than rules.
        """
        one = self.find(name)
        if one.state is not State.CREATED:
            raise PreconditionFailed(f"experiment {name!r} is {one.state.name.lower()}: only a created one can start")
        for other in self.running:
            if other.layer != one.layer and (both := one.settings & other.settings - {"rules"}):
                raise PreconditionFailed(
                    f"{name!r} and running {other.name!r}, of layers {one.layer!r} and {other.layer!r}, both set "
                    f"{', '.join(sorted(both))}: put them into one layer, or stop {other.name!r} first"
                )
        return self._with(replace(one, state=State.RUNNING, started_ms=now_ms))

    def stopped(self, name: str, now_ms: int) -> "Experiments":
        """Stop an experiment: its users get the defaults. Raises: NotFound, PreconditionFailed."""
        one = self.find(name)
        if one.state is not State.RUNNING:
            raise PreconditionFailed(f"experiment {name!r} is {one.state.name.lower()}: only a running one can stop")
        return self._with(replace(one, state=State.STOPPED, stopped_ms=now_ms))

    def removed(self, name: str) -> "Experiments":
        """Remove an experiment. Raises: NotFound, PreconditionFailed if it is running."""
        if self.find(name).state is State.RUNNING:
            raise PreconditionFailed(f"experiment {name!r} runs: stop it first")
        return replace(
            self,
            revision=self.revision + 1,
            experiments={other: one for other, one in self.experiments.items() if other != name},
        )

    def check_no_arm(self, version_set: str) -> None:
        """Raise PreconditionFailed if a running experiment has an arm of this version set."""
        for one in self.running:
            if any(arm.version_set == version_set for arm in one.arms):
                raise PreconditionFailed(
                    f"set {version_set!r} answers an arm of running experiment {one.name!r}: stop that first"
                )

    def _with(self, one: Experiment) -> "Experiments":
        return replace(self, revision=self.revision + 1, experiments={**self.experiments, one.name: one})

    def _free(self, new: Experiment) -> float:
        """Return the start of the layer's first gap that is wide enough. Stopped experiments leave their share free.

        Raises: PreconditionFailed.
        """
        taken = sorted(
            (one.first, one.first + one.share)
            for one in self.experiments.values()
            if one.layer == new.layer and one.state is not State.STOPPED
        )
        at = 0.0
        for first, end in [*taken, (_WHOLE, _WHOLE)]:
            if first - at >= new.share - _ROUNDING:
                return at
            at = end
        left = _WHOLE - sum(end - first for first, end in taken)
        raise PreconditionFailed(
            f"experiment {new.name!r} wants {new.share:.1%} of the users of layer {new.layer!r}, in one piece; "
            f"{left:.1%} are free: stop or remove one of the layer's, or take another layer"
        )


def check(new: Experiment) -> None:
    """Raise InvalidRequest for the first invalid field."""
    for name, value in (
        ("name", new.name),
        ("layer", new.layer),
        *((f"arms[{n}].name", a.name) for n, a in enumerate(new.arms)),
    ):
        if not _NAME.fullmatch(value):
            raise InvalidRequest.of(name, value, "1-64 of a-z, 0-9 and '-', no '-' first")
    if not 0 < new.share <= 1:  # NaN fails too
        raise InvalidRequest.of("share", new.share, "above 0, at most 1")
    if not 2 <= len(new.arms) <= (2 if new.interleaved else MAX_ARMS):
        raise InvalidRequest.of(
            "arms", f"{len(new.arms)} arms", "exactly 2 where interleaved" if new.interleaved else f"2-{MAX_ARMS}"
        )
    if len({arm.name for arm in new.arms}) < len(new.arms):
        raise InvalidRequest.of("arms", [arm.name for arm in new.arms], "each name once")
    for number, arm in enumerate(new.arms):
        _check_arm(f"arms[{number}]", arm)
    if abs(sum(arm.share for arm in new.arms) - 1) > _ROUNDING:
        raise InvalidRequest.of(
            "arms", f"shares that add up to {sum(arm.share for arm in new.arms):g}", "shares that add up to 1"
        )
    for name, value in new.context.items():
        validate_text("context", name, 1, 256)
        validate_text(f"context[{name!r}]", value, 0, 256)


def _check_arm(field_name: str, arm: Arm) -> None:
    if not 0 < arm.share < 1:
        raise InvalidRequest.of(f"{field_name}.share", arm.share, "above 0, below 1")
    if not 0 <= arm.diversity <= 1:
        raise InvalidRequest.of(f"{field_name}.diversity", arm.diversity, "0-1")
    if arm.new_item_share is not None and not 0 <= arm.new_item_share <= 0.5:
        raise InvalidRequest.of(f"{field_name}.new_item_share", arm.new_item_share, "0-0.5")
    if arm.max_gap is not None and not 0 <= arm.max_gap < math.inf:
        raise InvalidRequest.of(f"{field_name}.max_gap", arm.max_gap, "a finite number, at least 0")
    if len(arm.rules) > MAX_RULES:
        raise InvalidRequest.of(f"{field_name}.rules", f"{len(arm.rules)} rules", f"at most {MAX_RULES}")


EXPERIMENTS = "experiments"


def experiment_message(one: Experiment) -> events_pb2.Experiment:
    message = events_pb2.Experiment(
        name=one.name,
        layer=one.layer,
        first=one.first,
        share=one.share,
        arms=[
            events_pb2.Arm(
                name=arm.name,
                share=arm.share,
                version_set=arm.version_set,
                rules=[rule_message(rule) for rule in arm.rules],
                diversity=arm.diversity,
                max_per_category=arm.max_per_category,
                new_item_share=arm.new_item_share,
                max_gap=arm.max_gap,
            )
            for arm in one.arms
        ],
        context=one.context,
        interleaved=one.interleaved,
        salt=one.salt,
        state=int(one.state),  # type: ignore[arg-type]
    )
    for name, time_ms in (("started_time", one.started_ms), ("stopped_time", one.stopped_ms)):
        if time_ms:
            set_ms(getattr(message, name), time_ms)
    return message


def experiment_of(message: events_pb2.Experiment) -> Experiment:
    """The inverse of `experiment_message`, validated. Raises: InvalidRequest with the field."""
    if message.state not in {int(state) for state in State}:
        raise InvalidRequest.of("state", message.state, "1-3, see Experiment.State")
    found = Experiment(
        name=message.name,
        layer=message.layer,
        first=message.first,
        share=message.share,
        arms=tuple(
            Arm(
                name=arm.name,
                share=arm.share,
                version_set=arm.version_set,
                rules=rules_of(arm.rules),
                diversity=arm.diversity,
                max_per_category=arm.max_per_category,
                new_item_share=arm.new_item_share if arm.HasField("new_item_share") else None,
                max_gap=arm.max_gap if arm.HasField("max_gap") else None,
            )
            for arm in message.arms
        ),
        context=dict(message.context),
        interleaved=message.interleaved,
        salt=message.salt,
        state=State(message.state),
        started_ms=read_ms(message.started_time, "started_time") if message.HasField("started_time") else 0,
        stopped_ms=read_ms(message.stopped_time, "stopped_time") if message.HasField("stopped_time") else 0,
    )
    check(found)
    if not 0 <= found.first <= 1 - found.share + 1e-9:  # NaN fails too
        raise InvalidRequest.of("first", found.first, f"0 to {1 - found.share:g}, 1 less the share")
    return found


def encode_operation(made: Operation[Experiments]) -> bytes:
    message = events_pb2.Experiments(experiments=map(experiment_message, made.after.experiments.values()))
    set_operation(message, made)
    return message.SerializeToString()


def decode_operation(value: bytes | None) -> Operation[Experiments]:
    message = parse(events_pb2.Experiments, value)
    found: dict[str, Experiment] = {}
    for number, one in enumerate(message.experiments):
        try:
            found[one.name] = experiment_of(one)
        except InvalidRequest as exc:
            raise InvalidRequest(f"experiments[{number}].{exc.message}") from exc
    if len(found) != len(message.experiments):
        raise InvalidRequest.of("experiments", [one.name for one in message.experiments], "each name once")
    return operation_of(message, Experiments(revision=message.revision, experiments=found))


OPERATIONS = OperationTopic(name=EXPERIMENTS, encode=encode_operation, decode=decode_operation)
TOPIC = OPERATIONS.topic
