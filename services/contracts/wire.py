"""Query states, filters, rules, certificates, freshness and explanations, as Protobuf and plain values.

A query state's bytes are the same in Redis, on the stream and in Protobuf; only scorers convert them to arrays
(`unpacked`). An explanation groups votes by type, so that it identifies no other user.

Letters: P_q query components, P component pairs, d component width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from freshet.v1 import candidates_pb2, common_pb2, reranker_pb2

from services.algorithms.indexes.protocol import ESTIMATE, EXACT, Certificate
from services.algorithms.rules.attributes import Comparison, Condition
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts.attributes import COMPARISONS, condition_message, read_value, validate_value
from services.platform.errors import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQueryState:
    """Half-precision little-endian bytes, unchecked: components row-major (P_q, d), gate (P,) or empty for a plain dot
    product.
    """

    model_version: str
    components: bytes
    gate: bytes
    num_components: int
    component_width: int


def query_state_message(state: PackedQueryState) -> common_pb2.QueryState:
    return common_pb2.QueryState(
        model_version=state.model_version,
        components=state.components,
        gate=state.gate,
        num_components=state.num_components,
        component_width=state.component_width,
    )


def query_state_of(message: common_pb2.QueryState) -> PackedQueryState:
    return PackedQueryState(
        model_version=message.model_version,
        components=message.components,
        gate=message.gate,
        num_components=message.num_components,
        component_width=message.component_width,
    )


def unpacked(message: common_pb2.QueryState | PackedQueryState, unpack: Callable[..., T]) -> T:
    """Return a message's arrays. unpack: `algorithms.scoring.packed_state.unpack_query_state`. Raises:
    InvalidRequest.
    """
    try:
        return unpack(
            message.components,
            message.gate,
            num_components=message.num_components,
            component_width=message.component_width,
        )
    except ValueError as exc:
        raise InvalidRequest(f"query_state: {exc}") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedPair:
    """One term of the score: gating weight times cosine. from_model: the model's part of `contribution`."""

    query_component: int
    item_component: int
    weight: float
    cosine: float
    contribution: float
    from_model: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedScore:
    """score = from_model + from_interactions. pairs: largest first. model_share: the model's weight (lambda). rules:
    indices of the query's rules that name the item.
    """

    score: float
    from_model: float
    from_interactions: float
    model_share: float
    num_interactions: int
    pairs: Sequence[ExplainedPair]
    title: str
    index_version: str
    rules: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VotingInteractions:
    """The remembered interactions of one type that contribute to a vote. Ages are in seconds of stream time."""

    type: str
    count: int
    newest_age_seconds: float
    oldest_age_seconds: float
    vote: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemVotes:
    """An item's vote, in similarity units. voters: votes of remembered interactions; item neighbours give the
    rest of the vote. num_neighbours: how many nearest remembered interactions the search uses. model_share: the
    model's weight (lambda) against the vote.
    """

    vote: float
    num_neighbours: int
    model_share: float
    voters: Sequence[VotingInteractions]
    index_version: str


def conditions_of(messages: Iterable[Any], name: str = "filter.where") -> tuple[Condition, ...]:
    """Return the conditions in the messages. Raises: InvalidRequest; its field begins with `name`."""
    conditions = []
    for position, message in enumerate(messages):
        field = f"{name}[{position}]"
        if message.comparison not in COMPARISONS:
            raise InvalidRequest.of(f"{field}.comparison", message.comparison, "1-8, see AttributeCondition")
        values = tuple(read_value(value, f"{field}.values[{at}]") for at, value in enumerate(message.values))
        for at, value in enumerate(values):
            validate_value(f"{field}.values[{at}]", value)
        try:
            conditions.append(Condition(message.name, Comparison(COMPARISONS[message.comparison]), values))
        except ValueError as exc:
            raise InvalidRequest(f"{field}: {exc}") from exc
    return tuple(conditions)


def filter_of(
    message: common_pb2.Filter, seen_item_ids: Sequence[str] = (), *, excludes_seen: bool = False
) -> ItemFilter:
    """Return the filter. excludes_seen: default for an absent `exclude_seen`. Raises: InvalidRequest with the field."""
    return ItemFilter(
        allow_item_ids=tuple(message.allow_item_ids),
        deny_item_ids=tuple(message.deny_item_ids),
        allow_categories=tuple(message.allow_categories),
        deny_categories=tuple(message.deny_categories),
        where=conditions_of(message.where) if message.where else (),
        exclude_seen=message.exclude_seen if message.HasField("exclude_seen") else excludes_seen,
        seen_item_ids=tuple(seen_item_ids),
    )


def filter_message(wanted: ItemFilter) -> common_pb2.Filter:
    """Return a filter's message, without seen items."""
    return common_pb2.Filter(
        exclude_seen=wanted.exclude_seen,
        allow_item_ids=wanted.allow_item_ids,
        deny_item_ids=wanted.deny_item_ids,
        allow_categories=wanted.allow_categories,
        deny_categories=wanted.deny_categories,
        where=[condition_message(one.name, one.comparison, one.values) for one in wanted.where],
    )


def rules_of(messages: Iterable[common_pb2.Rule]) -> tuple[Rule, ...]:
    """Return the rules of a request. Raises: InvalidRequest with the field."""
    return tuple(rule_of(message, f"rules[{position}]") for position, message in enumerate(messages))


def rule_of(message: common_pb2.Rule, name: str) -> Rule:
    """Return a rule. name: its field in errors. Raises: InvalidRequest."""
    which = ItemFilter(
        exclude_seen=False,
        allow_item_ids=tuple(message.item_ids),
        allow_categories=tuple(message.categories),
        where=conditions_of(message.where, f"{name}.where") if message.where else (),
    )
    return Rule(
        name=message.name, which=which, boost=message.boost, bury=message.bury, pin=message.pin, cap=message.cap
    )


def rule_message(rule: Rule) -> common_pb2.Rule:
    """The inverse of `rule_of`. Only an effect other than zero is set."""
    which = filter_message(rule.which)
    effect: dict[str, Any] = {
        name: value
        for name, value in (("boost", rule.boost), ("bury", rule.bury), ("pin", rule.pin), ("cap", rule.cap))
        if value
    }
    return common_pb2.Rule(
        name=rule.name, item_ids=which.allow_item_ids, categories=which.allow_categories, where=which.where, **effect
    )


def certificate_message(certificate: Certificate) -> common_pb2.Certificate:
    return common_pb2.Certificate(kind=f"KIND_{certificate.kind.upper()}", gap=certificate.gap)


def certificate_of(message: common_pb2.Certificate) -> Certificate:
    """The inverse of `certificate_message`; an unknown kind is an estimate."""
    if message.kind == common_pb2.Certificate.KIND_EXACT:
        return EXACT
    return Certificate(message.gap) if message.kind == common_pb2.Certificate.KIND_BOUNDED else ESTIMATE


def index_freshness_message(
    deltas_offset: int, newest_recorded_ms: int | None, lag_seconds: float | None
) -> common_pb2.IndexFreshness:
    message = common_pb2.IndexFreshness(deltas_offset=deltas_offset, lag_seconds=lag_seconds)
    if newest_recorded_ms is not None:
        message.newest_recorded_time.FromMilliseconds(newest_recorded_ms)
    return message


def explained_message(found: ExplainedScore) -> reranker_pb2.ExplainScoreResponse:
    return reranker_pb2.ExplainScoreResponse(**asdict(found))


def explained_of(message: reranker_pb2.ExplainScoreResponse) -> ExplainedScore:
    return ExplainedScore(
        score=message.score,
        from_model=message.from_model,
        from_interactions=message.from_interactions,
        model_share=message.model_share,
        num_interactions=message.num_interactions,
        pairs=[
            ExplainedPair(
                query_component=pair.query_component,
                item_component=pair.item_component,
                weight=pair.weight,
                cosine=pair.cosine,
                contribution=pair.contribution,
                from_model=pair.from_model,
            )
            for pair in message.pairs
        ],
        title=message.title,
        index_version=message.index_version,
        rules=tuple(message.rules),
    )


def votes_message(votes: ItemVotes) -> candidates_pb2.ExplainVotesResponse:
    return candidates_pb2.ExplainVotesResponse(**asdict(votes))


def votes_of(message: candidates_pb2.ExplainVotesResponse) -> ItemVotes:
    return ItemVotes(
        vote=message.vote,
        num_neighbours=message.num_neighbours,
        model_share=message.model_share,
        voters=[
            VotingInteractions(
                type=one.type,
                count=one.count,
                newest_age_seconds=one.newest_age_seconds,
                oldest_age_seconds=one.oldest_age_seconds,
                vote=one.vote,
            )
            for one in message.voters
        ],
        index_version=message.index_version,
    )
