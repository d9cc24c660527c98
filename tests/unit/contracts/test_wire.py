"""Values and their messages: the same value comes back, and what does not fit is refused by field."""

import math

import pytest
from freshet.v1 import common_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.algorithms.indexes.protocol import ESTIMATE, EXACT, Certificate
from services.algorithms.rules.attributes import Comparison, Condition
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.contracts import wire
from services.contracts.wire import ExplainedPair, ExplainedScore, ItemVotes, VotingInteractions
from services.platform.errors import InvalidRequest

NAMES = st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple)
WHERE = st.lists(
    st.sampled_from(
        [
            Condition("price", Comparison.AT_MOST, (20.0,)),
            Condition("released", Comparison.ABOVE, (1_700_000_000_123,)),
            Condition("language", Comparison.NONE_OF, ("en", "de")),
            Condition("price", Comparison.ABSENT),
        ]
    ),
    max_size=3,
).map(tuple)
FILTERS = st.builds(
    ItemFilter,
    allow_item_ids=NAMES,
    deny_item_ids=NAMES,
    allow_categories=NAMES,
    deny_categories=NAMES,
    where=WHERE,
    exclude_seen=st.booleans(),
)


@given(FILTERS)
def test_a_filter_comes_back(wanted: ItemFilter) -> None:
    assert wire.filter_of(wire.filter_message(wanted), excludes_seen=not wanted.exclude_seen) == wanted


def test_where_a_filter_does_not_say_the_caller_decides_about_seen_items() -> None:
    for said in (True, False):
        found = wire.filter_of(common_pb2.Filter(), ["a"], excludes_seen=said)
        assert found == ItemFilter(exclude_seen=said, seen_item_ids=("a",))


@pytest.mark.parametrize("effect", [{"boost": 0.5}, {"bury": 0.25}, {"pin": 2}, {"cap": 1}])
@given(names=NAMES, where=WHERE)
def test_a_rule_comes_back(effect: dict[str, float], names: tuple[str, ...], where: tuple[Condition, ...]) -> None:
    which = ItemFilter(exclude_seen=False, allow_item_ids=names, allow_categories=names[:1], where=where)
    rule = Rule(name="r", which=which, **effect)  # type: ignore[arg-type]
    assert wire.rules_of([wire.rule_message(rule)]) == (rule,)


def test_a_rule_that_does_not_fit_is_named_by_its_place() -> None:
    right = common_pb2.Rule(name="a", item_ids=["x"], pin=1)
    wrong = common_pb2.Rule(name="b", where=[{"name": "price", "comparison": 99}])
    with pytest.raises(InvalidRequest, match=r"^rules\[1\]\.where\[0\]\.comparison=99 allowed: 1-8"):
        wire.rules_of([right, wrong])


def test_a_condition_with_too_few_values_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^filter\.where\[0\]: 'price' at most: 0 values; allowed: 1"):
        wire.filter_of(common_pb2.Filter(where=[{"name": "price", "comparison": 1}]))


@pytest.mark.parametrize(
    ("certificate", "kind", "gap"),
    [(EXACT, "KIND_EXACT", 0.0), (Certificate(0.125), "KIND_BOUNDED", 0.125), (ESTIMATE, "KIND_ESTIMATE", None)],
)
def test_a_certificate_comes_back_with_its_gap(certificate: Certificate, kind: str, gap: float | None) -> None:
    message = wire.certificate_message(certificate)
    assert common_pb2.Certificate.Kind.Name(message.kind) == kind
    assert (message.gap if message.HasField("gap") else None) == gap
    assert wire.certificate_of(message) == certificate


def test_freshness_says_only_what_is_known() -> None:
    empty = wire.index_freshness_message(-1, None, None)
    assert (empty.deltas_offset, empty.HasField("newest_recorded_time"), empty.HasField("lag_seconds")) == (
        -1,
        False,
        False,
    )
    full = wire.index_freshness_message(7, 1_700_000_000_123, 0.5)
    assert (full.newest_recorded_time.ToMilliseconds(), full.lag_seconds) == (1_700_000_000_123, 0.5)


def test_explanations_come_back() -> None:
    pair = ExplainedPair(
        query_component=1, item_component=2, weight=0.5, cosine=-0.5, contribution=-0.25, from_model=math.pi
    )
    score = ExplainedScore(
        score=0.75,
        from_model=0.5,
        from_interactions=0.25,
        model_share=0.125,
        num_interactions=3,
        pairs=[pair],
        title="t",
        index_version="v1",
        rules=(0, 2),
    )
    assert wire.explained_of(wire.explained_message(score)) == score
    voters = [VotingInteractions(type="like", count=2, newest_age_seconds=1.5, oldest_age_seconds=9.0, vote=0.5)]
    votes = ItemVotes(vote=0.5, num_neighbours=8, model_share=0.0, voters=voters, index_version="v1")
    assert wire.votes_of(wire.votes_message(votes)) == votes
