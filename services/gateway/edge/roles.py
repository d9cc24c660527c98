"""Which roles may call which RPC: the one table. A method that is not in it is open to no key at all.

docs/operate/security.md repeats it for its readers; tests compare both with protos/freshet/v1/gateway.proto.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """What a key is for. A key may have several."""

    RECOMMEND = "recommend"  # reads answers, of any user
    INGEST = "ingest"  # writes interactions, of any user
    OPERATOR = "operator"  # changes the catalogue
    ERASER = "eraser"  # forgets users
    SUPPORT = "support"  # sees what is stored of a user


# One of the roles is enough.
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
# Only an operator's, an eraser's or support's: each call of these goes into the audit log, whatever comes of it.
AUDITED = frozenset(method for method, roles in ROLES_OF.items() if roles <= {Role.OPERATOR, Role.ERASER, Role.SUPPORT})
