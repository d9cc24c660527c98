"""The topic `experiments`: one record per operation, with the whole state after it.

`freshet experiments` writes it; gateways and `freshet results` read it in full.
"""

from freshet.v1 import events_pb2

from services.contracts.experiments import Arm, Experiment, Experiments, State, check
from services.contracts.operations import Operation, OperationTopic, operation_of, set_operation
from services.contracts.wire import rule_message, rules_of
from services.platform.errors import InvalidRequest
from services.platform.stream.records import parse, read_ms, set_ms

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
    value: bytes = message.SerializeToString()
    return value


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
