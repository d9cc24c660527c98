"""Client of Freshet's gateway: recommendations, search and explanations out, interactions in.

    from freshet_client import Client

    with Client("127.0.0.1:50050") as client:
        session = client.session("6040")
        session.record("661", "like")
        for item in session.recommend(k=3).items:
            print(item.item_id, item.score)

`Client` blocks and may be shared by threads, `AsyncClient` is for asyncio, `freshet_client.testing` has an in-memory
gateway for tests. Every error is a `FreshetError`.
"""

from freshet_client.aio import AsyncClient
from freshet_client.answers import (
    Certificate,
    ExplainedRule,
    ExplainedSimilarity,
    ExplainedVotes,
    Explanation,
    ForgetReport,
    FreshnessReport,
    FreshnessToken,
    IndexFreshness,
    PairContribution,
    PartitionProgress,
    PastInteraction,
    Provenance,
    Receipt,
    Recommendation,
    ScoredItem,
    SearchAnswer,
    SearchResult,
    SimilarAnswer,
    SimilarItem,
    SourceRank,
    SourceTime,
    StageTimes,
    StreamPosition,
    VotingInteractions,
)
from freshet_client.channel import Tls
from freshet_client.client import Client
from freshet_client.described import (
    CatalogueAttribute,
    CatalogueDescription,
    CategoryCount,
    EventTypeMeaning,
    StoredEvent,
    UserReport,
)
from freshet_client.errors import (
    Conflict,
    DeadlineExceeded,
    FreshetError,
    InternalError,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    PreconditionFailed,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unreachable,
    Unsupported,
)
from freshet_client.requests import (
    Condition,
    Filter,
    HistoryEvent,
    Impression,
    Interaction,
    Item,
    NotAgain,
    RecommendOptions,
    Rule,
)
from freshet_client.session import AsyncSession, Session

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "CatalogueAttribute",
    "CatalogueDescription",
    "CategoryCount",
    "Certificate",
    "Client",
    "Condition",
    "Conflict",
    "DeadlineExceeded",
    "EventTypeMeaning",
    "ExplainedRule",
    "ExplainedSimilarity",
    "ExplainedVotes",
    "Explanation",
    "Filter",
    "ForgetReport",
    "FreshetError",
    "FreshnessReport",
    "FreshnessToken",
    "HistoryEvent",
    "Impression",
    "IndexFreshness",
    "Interaction",
    "InternalError",
    "InvalidArgument",
    "Item",
    "NotAgain",
    "NotFound",
    "Overloaded",
    "PairContribution",
    "PartitionProgress",
    "PastInteraction",
    "PermissionDenied",
    "PreconditionFailed",
    "Provenance",
    "Receipt",
    "RecommendOptions",
    "Recommendation",
    "Rule",
    "ScoredItem",
    "SearchAnswer",
    "SearchResult",
    "Session",
    "SimilarAnswer",
    "SimilarItem",
    "SourceRank",
    "SourceTime",
    "StageTimes",
    "StoredEvent",
    "StreamPosition",
    "Tls",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
    "Unsupported",
    "UserReport",
    "VotingInteractions",
]
