"""For each RPC, the roles that may call it, and how many calls run at a time.

Tests compare the roles with docs/operate/security.md and gateway.proto.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.platform.rpc.admission import Admission


class Role(StrEnum):
    """What an API key permits. A key has one or more roles."""

    RECOMMEND = "recommend"  # reads answers, of any user
    INGEST = "ingest"  # writes interactions, of any user
    OPERATOR = "operator"  # changes the catalogue, rules, version sets and experiments; replays dead letters
    ERASER = "eraser"  # forgets users
    SUPPORT = "support"  # reads the data stored about a user


# A key needs one of the roles.
ROLES_OF: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "Recommend": frozenset({Role.RECOMMEND}),
        "Search": frozenset({Role.RECOMMEND}),
        "Similar": frozenset({Role.RECOMMEND}),
        "Explain": frozenset({Role.RECOMMEND}),
        "RecordInteractions": frozenset({Role.INGEST}),
        "StreamInteractions": frozenset({Role.INGEST}),
        "RecordImpressions": frozenset({Role.INGEST}),
        "UndoInteraction": frozenset({Role.INGEST}),
        "PutItems": frozenset({Role.OPERATOR}),
        "GetFreshness": frozenset({Role.RECOMMEND, Role.OPERATOR}),
        "DescribeCatalogue": frozenset({Role.RECOMMEND, Role.OPERATOR}),
        "GetItem": frozenset({Role.RECOMMEND, Role.OPERATOR}),
        "ListItems": frozenset({Role.RECOMMEND, Role.OPERATOR}),
        "GetUser": frozenset({Role.SUPPORT}),
        "ListExposures": frozenset({Role.SUPPORT}),
        "GetExposure": frozenset({Role.SUPPORT}),
        "TailInteractions": frozenset({Role.OPERATOR, Role.SUPPORT}),
        "GetVersionSets": frozenset({Role.OPERATOR}),
        "ChangeVersionSet": frozenset({Role.OPERATOR}),
        "ListRules": frozenset({Role.RECOMMEND, Role.OPERATOR}),
        "PutRules": frozenset({Role.OPERATOR}),
        "ListExperiments": frozenset({Role.OPERATOR}),
        "ChangeExperiment": frozenset({Role.OPERATOR}),
        "ForgetUser": frozenset({Role.ERASER}),
        "GetHealth": frozenset({Role.RECOMMEND, Role.OPERATOR, Role.SUPPORT}),
        "ListDeadLetters": frozenset({Role.OPERATOR}),
        "ReplayDeadLetter": frozenset({Role.OPERATOR}),
    }
)
# The audit log records each call of these RPCs.
AUDITED = frozenset(method for method, roles in ROLES_OF.items() if roles <= {Role.OPERATOR, Role.ERASER, Role.SUPPORT})


# A median latency up to these values is not overload (`Limit`).
QUICK_S, QUICK_WRITE_S, QUICK_SEARCH_S = 0.04, 0.05, 0.1


def admissions() -> "dict[str, Admission]":
    """Return each RPC's limit: adaptive for recommendations, searches and writes, fixed for all others."""
    # Imported here: the CLI imports this module for `freshet keys`, and `freshet bench gpu` runs without gRPC.
    from services.platform.rpc.admission import Admission

    # Two reads at a time are some 200 a second.
    reads = Admission("recommendations", smallest=2, largest=512, surplus=32, quick_s=QUICK_S)
    # A write mostly waits for Kafka. Many concurrent writes after a short stall of the machine are not overload.
    writes = Admission("writes", smallest=128, largest=2048, smallest_yielding=2, quick_s=QUICK_WRITE_S)
    streams = Admission("streams", smallest=128, largest=128, per_caller=64)
    rest = Admission("administration", smallest=32, largest=32)
    return {
        "Recommend": reads,
        # A search has no cheaper fallback: up to 32 wait (60 ms of work on two cores), further ones are refused.
        "Search": Admission("searches", smallest=4, largest=128, queue=32, quick_s=QUICK_SEARCH_S),
        "RecordInteractions": writes,
        "RecordImpressions": writes,
        "UndoInteraction": writes,
        "StreamInteractions": streams,
        "TailInteractions": Admission("tails", smallest=8, largest=8, per_caller=4),
        **dict.fromkeys(
            (
                *("Similar", "Explain", "GetFreshness", "GetVersionSets", "PutItems", "ForgetUser"),
                *("DescribeCatalogue", "GetItem", "ListItems", "GetUser", "GetHealth"),
                *("ListDeadLetters", "ReplayDeadLetter", "ListRules", "PutRules", "ChangeVersionSet"),
                *("ListExperiments", "ChangeExperiment"),
                *("ListExposures", "GetExposure"),
            ),
            rest,
        ),
    }
