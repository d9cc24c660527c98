"""What decoding answers, against every assignment of tokens to positions tried in turn."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identifier_scene import scene

from services.algorithms.generation.decoding import Mode, decode
from services.algorithms.generation.trie import IdentifierTrie
from services.offline.evaluation.generation.proof import assignment_score

MODES = get_args(Mode)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    positions=st.integers(1, 5),
    num_tokens=st.integers(2, 30),
    count=st.integers(0, 60),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    levels=st.sampled_from([0, 1, 3]),
    mode=st.sampled_from(MODES),
)
def test_with_beams_to_spare_the_answer_is_the_best_of_all_assignments(
    seed: int, positions: int, num_tokens: int, count: int, share: float, levels: int, mode: Mode
) -> None:
    small = scene(seed, positions=positions, num_tokens=num_tokens, count=count, share=share, levels=levels)
    wanted = small.by_trying_all(mode)
    found = decode(small.scores, small.tokens, small.trie(), beams=10_000, results=7, mode=mode)
    assert found.exact
    assert found.bound == -np.inf
    best = sorted(wanted.values(), reverse=True)[:7]
    np.testing.assert_allclose(found.scores, best, atol=1e-4)
    assert len(set(found.identifiers.tolist())) == len(found)
    for identifier, score in found:
        assert score == pytest.approx(wanted[identifier], abs=1e-4)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), beams=st.integers(1, 6), results=st.integers(1, 9), mode=st.sampled_from(MODES))
def test_few_beams_may_miss_an_identifier_but_score_none_wrong_and_state_a_bound(
    seed: int, beams: int, results: int, mode: Mode
) -> None:
    small = scene(seed, positions=4, num_tokens=12, count=80)
    wanted = small.by_trying_all(mode)
    found = decode(small.scores, small.tokens, small.trie(), beams=beams, results=results, mode=mode)
    for identifier, score in found:
        assert score == pytest.approx(wanted[identifier], abs=1e-4)
    best = sorted(wanted.values(), reverse=True)[:results]
    if found.exact:
        np.testing.assert_allclose(found.scores, best, atol=1e-4)
    missing = [score for identifier, score in wanted.items() if identifier not in found.identifiers]
    worst = found.scores[-1] if len(found) == results else -np.inf
    assert all(score <= max(found.bound, worst) + 1e-4 for score in missing)


def test_equal_scores_come_in_the_order_of_identifiers() -> None:
    trie = IdentifierTrie.build([[2], [1], [2], [1, 2]], [7, 3, 5, 9], max_tokens=2, num_tokens=3)
    scores = np.zeros((2, 3), dtype=np.float32)
    found = decode(scores, np.arange(3, dtype=np.int32), trie, beams=4, results=3)
    assert found.identifiers.tolist() == [3, 5, 7]


def test_tokens_in_the_wrong_order_score_by_permutation_and_not_by_fixed_positions() -> None:
    """'film noir' and 'noir film' where the model expects noir first."""
    trie = IdentifierTrie.build([[1, 2], [3, 4]], [0, 1], max_tokens=2, num_tokens=5)
    scores = np.full((2, 5), -9.0, dtype=np.float32)
    scores[0, 2] = scores[1, 1] = -1  # the identifier's second token first
    scores[0, 3] = scores[1, 4] = -3
    tokens = np.arange(5, dtype=np.int32)
    assert list(decode(scores, tokens, trie, beams=8, results=2)) == [(0, -2.0), (1, -6.0)]
    assert list(decode(scores, tokens, trie, beams=8, results=2, mode="fixed")) == [(1, -6.0), (0, -18.0)]


def test_unused_positions_pay_for_padding() -> None:
    trie = IdentifierTrie.build([[1], [1, 1, 1]], [0, 1], max_tokens=3, num_tokens=2)
    scores = np.array([[-4.0, -1.0], [-2.0, -1.0], [-3.0, -1.0]], dtype=np.float32)
    found = dict(decode(scores, np.arange(2, dtype=np.int32), trie, beams=8, results=2))
    # The one token goes where padding is least likely: -1 there, -2 and -3 for padding at the others.
    assert found == {0: -6.0, 1: -3.0}


def test_an_assignment_is_scored_as_its_definition_says() -> None:
    small = scene(3, positions=4, num_tokens=9, count=40, share=1.0)
    for identifier, score in small.by_trying_all("permutation").items():
        rows = small.scores[:, small.sequences[identifier]].T
        assert assignment_score(rows, small.scores[:, 0]) == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize(
    ("scores", "tokens", "options", "message"),
    [
        (np.zeros((2, 3)), [0, 1], {}, r"scores have shape \(2, 3\); allowed: \(s, 2\)"),
        (np.zeros((2, 2)), [1, 2], {}, r"tokens begin with \[1, 2\]; allowed: rising, 0"),
        (np.zeros((2, 2)), [0, 0], {}, r"tokens begin with \[0, 0\]"),
        (np.zeros((2, 0)), [], {}, r"tokens begin with \[\]"),
        (np.zeros((1, 2)), [0, 1], {}, "identifiers have up to 2 tokens; allowed: 1, the positions"),
        (np.zeros((13, 2)), [0, 1], {}, r"gains have shape \(2, 13\); allowed: \(2, 1 to 12\)"),
        (np.array([[0, np.nan], [0, 0]]), [0, 1], {}, "scores hold a value that is not finite"),
        (np.zeros((2, 2)), [0, 1], {"beams": 0}, "beams=0 allowed: at least 1"),
        (np.zeros((2, 2)), [0, 1], {"results": 0}, "results=0 allowed: at least 1"),
        (np.zeros((2, 2)), [0, 1], {"mode": "any"}, "mode='any' allowed: permutation, fixed"),
        (np.zeros((2, 2)), [0, 1], {"allowed": np.ones(1, bool)}, "allowed is given without items"),
    ],
)
def test_a_wrong_question_is_refused(scores: np.ndarray, tokens: list[int], options: dict, message: str) -> None:
    trie = IdentifierTrie.build([[1, 1]], [0], max_tokens=2, num_tokens=2)
    with pytest.raises(ValueError, match=message):
        decode(
            scores.astype(np.float32),
            np.array(tokens, dtype=np.int32),
            trie,
            **{"beams": 8, "results": 2, **options},
        )
