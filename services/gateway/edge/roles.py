"""The roles that may call each RPC. Tests compare them with docs/operate/security.md and gateway.proto."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


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
