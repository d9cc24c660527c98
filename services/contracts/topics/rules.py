"""The topic `rules`. Each operation writes one record with all standing rules.

A gateway writes the topic for operators; gateways read it in full. Each gateway checks the rules against its model's
attributes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from freshet.v1 import events_pb2

from services.algorithms.rules.ranking_rules import Rule
from services.contracts.operations import Operation, OperationTopic, Revised, operation_of, set_operation
from services.contracts.wire import rule_message, rules_of
from services.platform.errors import InvalidRequest
from services.platform.stream.records import parse

RULES = "rules"
MAX_STANDING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingRules(Revised):
    """All standing rules, in their order."""

    rules: tuple[Rule, ...] = ()

    def replaced_by(self, rules: Sequence[Rule]) -> "StandingRules":
        return StandingRules(revision=self.revision + 1, rules=tuple(rules))


def encode_operation(made: Operation[StandingRules]) -> bytes:
    message = events_pb2.StandingRules(rules=map(rule_message, made.after.rules))
    set_operation(message, made)
    return message.SerializeToString()


def decode_operation(value: bytes | None) -> Operation[StandingRules]:
    message = parse(events_pb2.StandingRules, value)
    if len(message.rules) > MAX_STANDING:
        raise InvalidRequest.of("rules", f"{len(message.rules)} rules", f"at most {MAX_STANDING}")
    return operation_of(message, StandingRules(revision=message.revision, rules=rules_of(message.rules)))


OPERATIONS = OperationTopic(name=RULES, encode=encode_operation, decode=decode_operation)
TOPIC = OPERATIONS.topic
