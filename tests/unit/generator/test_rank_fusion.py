"""Reciprocal rank fusion: places count, the order of the sources does not."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.text.rank_fusion import Fused, reciprocal_rank_fusion

RANKINGS = st.dictionaries(
    st.sampled_from(["text_mol", "phrases", "lexical"]), st.lists(st.sampled_from("abcdefgh"), unique=True), max_size=3
)


def test_an_item_that_two_sources_found_comes_before_the_first_of_one() -> None:
    fused = reciprocal_rank_fusion({"lexical": ["a", "b"], "text_mol": ["c", "b"]})
    assert [one.item_id for one in fused] == ["b", "a", "c"]
    assert fused[0] == Fused("b", 1 / 12 + 1 / 12, (("lexical", 2), ("text_mol", 2)))


def test_scores_are_the_sums_of_the_papers_formula() -> None:
    fused = reciprocal_rank_fusion({"lexical": ["a", "b", "c"], "phrases": ["c"]})
    wanted = {"a": 1 / 11, "b": 1 / 12, "c": 1 / 13 + 1 / 11}
    assert {one.item_id: one.score for one in fused} == pytest.approx(wanted)


def test_an_id_named_twice_counts_at_its_first_place() -> None:
    assert [one.ranks for one in reciprocal_rank_fusion({"lexical": ["a", "b", "a"]})] == [
        (("lexical", 1),),
        (("lexical", 2),),
    ]


def test_no_source_and_empty_sources_fuse_to_nothing() -> None:
    assert reciprocal_rank_fusion({}) == []
    assert reciprocal_rank_fusion({"lexical": [], "phrases": []}) == []


@settings(deadline=None)
@given(RANKINGS)
def test_the_order_of_the_sources_never_matters(rankings: dict[str, list[str]]) -> None:
    answers = [
        reciprocal_rank_fusion({source: rankings[source] for source in order})
        for order in itertools.permutations(rankings)
    ]
    assert all(answer == answers[0] for answer in answers)
    assert {one.item_id for one in answers[0]} == {item for ranking in rankings.values() for item in ranking}


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), unique=True))
def test_one_source_alone_keeps_its_order(ranking: list[str]) -> None:
    assert [one.item_id for one in reciprocal_rank_fusion({"phrases": ranking})] == ranking
