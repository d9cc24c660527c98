"""Votes: equation 6 over the remembered interactions, while they change."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pefa_scene import Scene, make_scene, take

from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import IndexFullError
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.votes import VotingIndex, with_votes
from services.algorithms.scoring.states import QueryStates


def index_of(scene: Scene, *, leave_out: int | None = None, max_bytes: int | None = None) -> VotingIndex:
    _, num_components, width = scene.queries.components.shape
    return VotingIndex(
        num_components=num_components, width=width, model_version="m", leave_out=leave_out, max_bytes=max_bytes
    )


def formula(
    entries: list[MemoryEntry], queries: QueryStates, k: int, leave_out: int | None
) -> list[tuple[dict[str, float], list[float]]]:
    """Mean cosines and votes, entry by entry in float64."""
    kept = [component for component in range(queries.components.shape[1]) if component != leave_out]
    answers = []
    for query in queries.components.astype(np.float64):
        similarities = []
        for entry in entries:
            stored = entry.components.astype(np.float64)
            cosines = [
                stored[c] @ query[c] / max(np.linalg.norm(stored[c]) * np.linalg.norm(query[c]), 1e-300) for c in kept
            ]
            similarities.append((-np.mean(cosines), entry.entry_id, entry))
        nearest = sorted(similarities, key=lambda row: row[:2])[:k]
        votes: dict[str, float] = {}
        for distance, _, entry in nearest:
            votes[entry.item_id] = votes.get(entry.item_id, 0.0) - distance * entry.weight / k
        answers.append((votes, [-distance for distance, _, _ in nearest]))
    return answers


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 60), st.sampled_from([None, 2]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_votes_are_equation_6_divided_by_k(seed: int, count: int, k: int, leave_out: int | None) -> None:
    scene = make_scene(seed, count)
    asked = make_scene(seed + 1, 3).queries
    index = index_of(scene, leave_out=leave_out)
    index.apply(upserts=scene.entries())
    found = index.neighbours(asked, k)
    for voters, votes, (wanted, similarities) in zip(
        found, index.votes(asked, k), formula(scene.entries(), asked, k, leave_out), strict=True
    ):
        assert votes == pytest.approx(wanted, abs=1e-6)
        assert sum(votes.values()) == pytest.approx(sum(voter.vote for voter in voters), abs=1e-9)
        assert [voter.similarity for voter in voters] == pytest.approx(similarities, abs=1e-6)
        assert len(voters) == min(k, count)


def test_a_voter_explains_its_vote() -> None:
    scene = make_scene(4, 10)
    index = index_of(scene)
    index.apply(upserts=scene.entries())
    by_id = {entry.entry_id: entry for entry in scene.entries()}
    for voter in index.neighbours(scene.queries, 4)[0]:
        entry = by_id[voter.entry_id]
        assert (voter.item_id, voter.event_seconds, voter.weight) == (entry.item_id, entry.event_seconds, entry.weight)
        assert voter.interaction_type == "rating"
        assert voter.vote == voter.weight * voter.similarity / 4
        assert not hasattr(voter, "user")


def test_the_user_component_has_no_say_in_who_is_near() -> None:
    scene = make_scene(5, 30)
    index = index_of(scene, leave_out=0)
    index.apply(upserts=scene.entries())
    other = scene.queries.components.copy()
    other[:, 0] = -other[:, 0]
    assert index.votes(QueryStates(components=other), 5) == index.votes(scene.queries, 5)


def test_an_empty_memory_and_a_k_beyond_it_make_smaller_answers() -> None:
    scene = make_scene(6, 3)
    index = index_of(scene)
    assert index.votes(scene.queries, 10) == [{}, {}, {}]
    version = index.version
    index.apply(upserts=scene.entries())
    assert [len(voters) for voters in index.neighbours(scene.queries, 10)] == [3, 3, 3]
    assert index.version != version
    index.apply(removals=[entry.entry_id for entry in scene.entries()] + ["unknown"])
    assert len(index) == 0
    assert index.votes(take(scene.queries, [0]), 10) == [{}]
    assert index.votes(take(scene.queries, []), 10) == []


def test_an_entry_that_comes_again_is_replaced() -> None:
    scene = make_scene(7, 3)
    entries = scene.entries()
    index = index_of(scene)
    index.apply(upserts=entries)
    again = MemoryEntry(
        entry_id=entries[0].entry_id,
        item_id=entries[0].item_id,
        components=entries[0].components,
        weight=0.125,
        interaction_type="rating",
        event_seconds=0,
    )
    index.apply(upserts=[again])
    assert len(index) == 3
    assert index.neighbours(take(scene.queries, [0]), 1)[0][0].weight == 0.125


def test_codes_of_a_large_memory_find_what_scanning_finds() -> None:
    scene = make_scene(8, 4500)
    asked = make_scene(9, 20).queries
    index = index_of(scene)
    index.apply(upserts=scene.entries())
    scanned = index.votes(asked, 10)
    index.index.merge()
    assert index.votes(asked, 10) == [pytest.approx(votes, abs=1e-9) for votes in scanned]


def test_it_answers_while_it_changes() -> None:
    scene = make_scene(10, 3000)
    entries = scene.entries()
    index = index_of(scene)
    index.apply(upserts=entries[:1000])
    asked = take(scene.queries, slice(0, 2))
    problems: list[str] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            for voters in index.neighbours(asked, 20):
                if len(voters) != 20:
                    problems.append(f"{len(voters)} voters")
                if [voter.similarity for voter in voters] != sorted((v.similarity for v in voters), reverse=True):
                    problems.append("out of order")

    reader = threading.Thread(target=ask)
    with BackgroundMerge(index.index):
        reader.start()
        for start in range(1000, 3000, 50):
            index.apply(
                upserts=entries[start : start + 50],
                removals=[entry.entry_id for entry in entries[start - 1000 : start - 950]],
            )
        done.set()
        reader.join()
    assert problems == []
    fresh = index_of(scene)
    fresh.apply(upserts=entries[2000:])
    assert len(index) == 1000
    assert index.votes(asked, 20) == [pytest.approx(votes, abs=1e-9) for votes in fresh.votes(asked, 20)]


def test_a_full_memory_refuses_and_answers_on() -> None:
    scene = make_scene(11, 400)
    entries = scene.entries()
    index = index_of(scene, max_bytes=120_000)
    index.apply(upserts=entries[:10])
    before = index.votes(scene.queries, 5)
    with pytest.raises(IndexFullError):
        index.apply(upserts=entries[5:])
    assert index.votes(scene.queries, 5) == before
    assert len(index) == 10
    assert index.memory.total <= 120_000
    assert index.bytes_per_entry > 4 * 3 * 8


def test_votes_and_scores_are_blended() -> None:
    got = with_votes(np.array([0.5, -0.2]), ["a", "b"], {"b": 0.4, "c": 1.0}, 0.75)
    assert got == pytest.approx([0.375, -0.05])
    assert with_votes(np.array([0.5]), ["a"], {}, 1.0).tolist() == [0.5]
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share="):
            with_votes(np.array([0.5]), ["a"], {}, share)


def test_what_does_not_fit_is_refused() -> None:
    scene = make_scene(12, 3)
    index = index_of(scene)
    index.apply(upserts=scene.entries())
    with pytest.raises(ValueError, match="k=0 allowed: at least 1"):
        index.votes(scene.queries, 0)
    with pytest.raises(ValueError, match="queries have 3 components of width 4; this memory holds 3 of 8"):
        index.votes(make_scene(12, 2, d=4).queries, 1)
    with pytest.raises(ValueError, match="this memory holds"):
        index.apply(upserts=make_scene(12, 2, d=4).entries())
    with pytest.raises(ValueError, match="more than once"):
        index.apply(upserts=[scene.entries()[0]] * 2)
    with pytest.raises(ValueError, match="both in upserts and in removals"):
        index.apply(upserts=scene.entries()[:1], removals=[scene.entries()[0].entry_id])
    assert len(index.neighbours(scene.queries, 5)[0]) == 3
    with pytest.raises(ValueError, match="leave_out=3 allowed: 0 to 2"):
        index_of(scene, leave_out=3)
    with pytest.raises(ValueError, match="leaves none"):
        VotingIndex(num_components=1, width=8, model_version="m", leave_out=0)
