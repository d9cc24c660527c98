"""The trie: what is in it, and what changes at once."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.algorithms.generation.decoding import decode
from services.algorithms.generation.trie import IdentifierTrie

NUM_TOKENS = 6
SEQUENCES = st.lists(st.integers(1, NUM_TOKENS - 1), min_size=1, max_size=4)


def found_in(trie: IdentifierTrie) -> dict[int, float]:
    """Every identifier, scored so that equal scores mean equal multisets of tokens."""
    scores = np.tile(np.array([0.0, 1.5, -2.25, 5.125, 7.0, -11.5], dtype=np.float32), (4, 1))
    return dict(decode(scores, np.arange(NUM_TOKENS, dtype=np.int32), trie, beams=10_000, results=10_000))


def wanted_for(sequences: dict[int, list[int]]) -> dict[int, float]:
    values = [0.0, 1.5, -2.25, 5.125, 7.0, -11.5]
    return {identifier: sum(values[token] for token in sequence) for identifier, sequence in sequences.items()}


def build(sequences: list[list[int]], identifiers: list[int] | None = None) -> IdentifierTrie:
    numbers = list(range(len(sequences))) if identifiers is None else identifiers
    return IdentifierTrie.build(sequences, numbers, max_tokens=4, num_tokens=NUM_TOKENS)


@settings(max_examples=100, deadline=None)
@given(
    first=st.lists(SEQUENCES, max_size=20),
    changes=st.lists(st.one_of(SEQUENCES, st.integers(0, 40)), max_size=40),
)
def test_any_inserts_and_deletes_are_seen_by_the_next_query(
    first: list[list[int]], changes: list[list[int] | int]
) -> None:
    trie, model = build(first), dict(enumerate(first))
    added = len(first)
    for change in changes:
        if isinstance(change, int):
            assert trie.delete(change) == (model.pop(change, None) is not None)
        else:
            trie.insert(change, added)
            model[added] = change
            added += 1
    assert len(trie) == len(model)
    assert all((identifier in trie) == (identifier in model) for identifier in range(-1, added + 2))
    assert found_in(trie) == wanted_for(model)


def test_many_equal_sequences_are_all_kept() -> None:
    trie = build([[1, 2]] * 500 + [[1]])
    assert sum(len(part.tokens) for part in trie.view()[0]) == 3
    assert len(found_in(trie)) == 501


def test_an_empty_trie_answers_nothing_and_takes_inserts() -> None:
    trie = build([])
    assert found_in(trie) == {}
    trie.insert([5, 4], 3)
    assert found_in(trie) == wanted_for({3: [5, 4]})


def test_inserts_while_others_search_are_never_half_seen() -> None:
    trie = build([[1]])
    stop = threading.Event()
    wrong: list[object] = []

    def search() -> None:
        known = 0
        while not stop.is_set():
            found = found_in(trie)
            if len(found) < known or found != wanted_for({number: [1 + number % 5] for number in found} | {0: [1]}):
                wrong.append(found)
            known = len(found)

    thread = threading.Thread(target=search)
    thread.start()
    for number in range(1, 150):
        trie.insert([1 + number % 5], number)
    stop.set()
    thread.join()
    assert not wrong
    assert len(found_in(trie)) == 150


@pytest.mark.parametrize(
    ("sequences", "identifiers", "message"),
    [
        ([[1], []], [0, 1], "identifier 1 has 0 tokens; allowed: 1 to 4"),
        ([[1], [1, 2, 3, 4, 5]], [0, 8], "identifier 8 has 5 tokens; allowed: 1 to 4"),
        ([[1], [1, 0]], [0, 1], r"identifier 1 holds token 0; allowed: 1 to 5 \(0 is padding\)"),
        ([[1], [1, 6]], [0, 1], "identifier 1 holds token 6; allowed: 1 to 5"),
        ([[1], [2]], [4, 4], "identifiers repeat"),
        ([[1], [2]], [4, -1], "identifier=-1 allowed: 0 or more"),
        ([[1], [2]], [4], "2 token sequences for 1 identifiers"),
    ],
)
def test_what_a_trie_cannot_hold_is_named(sequences: list[list[int]], identifiers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(sequences, identifiers)


def test_an_insert_that_cannot_be_changes_nothing() -> None:
    trie = build([[1], [2]])
    trie.delete(1)
    for sequence, identifier, message in (
        ([1, 2, 3, 4, 5], 7, "an identifier of 5 tokens; allowed: 1 to 4"),
        ([], 7, "an identifier of 0 tokens"),
        ([9], 7, "token=9 allowed: 1 to 5"),
        ([1], 0, "identifier=0 is there already"),
        ([1], 1, "identifier=1 is there already, or was"),
        ([1], -3, "identifier=-3 allowed: 0 to"),
    ):
        with pytest.raises(ValueError, match=message):
            trie.insert(sequence, identifier)
    assert found_in(trie) == wanted_for({0: [1]})
