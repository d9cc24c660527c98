"""Clicks on found items: what is held is a function of the surviving clicks, and the next answer feels them."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from retrieval_scene import make_items, make_pair_gate

from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa import query_feedback
from services.algorithms.pefa.policy import PAPER, SharePolicy
from services.algorithms.pefa.query_feedback import Click, QueryFeedback
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.evaluation.pefa.paper import relevance, xl_votes, xs_passages

WIDTH = 16
NUM_ITEMS = 6
QUERIES = ["space movies", "space films", "a sad film", "toys", "dogs", "", "wordless"]


def encode(query: str, components: int = 2) -> np.ndarray | None:
    """Words' directions added up, so that queries that share words are near; "wordless" says nothing."""
    if query in ("", "wordless"):
        return None
    total = np.zeros((components, WIDTH))
    for word in query.split():
        seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "big")
        total += np.random.default_rng(seed).normal(size=(components, WIDTH))
    return (total / np.linalg.norm(total, axis=1, keepdims=True)).astype(np.float32)


@dataclass
class Model:
    """Items of a text MoL (P_q = P_x = 2) or of a dot product, and what a feedback of them is made with."""

    components: int = 2
    seed: int = 0
    states: ItemStates = field(init=False)
    pair_gate: PairGate | None = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        items = make_items(rng, NUM_ITEMS, self.components, self.components, WIDTH)
        self.states = ItemStates(components=items.components)
        self.pair_gate = make_pair_gate(rng, self.components**2, 8) if self.components > 1 else None

    def feedback(self, capacity: int = 100) -> QueryFeedback:
        return QueryFeedback(
            lambda query: encode(query, self.components),
            states=self.states,
            index={f"item-{row}": row for row in range(NUM_ITEMS)},
            pair_gate=self.pair_gate,
            num_query_components=self.components,
            capacity=capacity,
        )

    def scores(self, states: ItemStates, query: str) -> np.ndarray:
        asked = encode(query, self.components)
        assert asked is not None
        queries = QueryStates(components=asked[None])
        return MolScorer(states, self.pair_gate).scores_float64(queries, 0, np.arange(len(states)))


def click(offset: int, query: str = "space movies", item: int = 0, user: str = "u", partition: int = 0) -> Click:
    return Click((partition, offset), query, f"item-{item}", user, 1_000 + offset)


CLICKS = st.builds(
    click,
    st.integers(0, 30),
    st.sampled_from(QUERIES),
    st.integers(0, NUM_ITEMS),  # the last one is not of the model
    st.sampled_from(["u", "v"]),
    st.integers(0, 1),
)


def one_per_place(clicks: list[Click]) -> list[Click]:
    return list({one.source_position: one for one in clicks}.values())


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Click], list[object], list[Click]]:
    """Clicks, then all operations in any order (a click may come twice), and the clicks that must survive."""
    clicks = one_per_place(draw(st.lists(CLICKS, max_size=14)))
    undone = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30)), max_size=5))
    forgotten = draw(st.lists(st.tuples(st.sampled_from("uv"), st.integers(0, 1), st.integers(-1, 30)), max_size=3))
    again = draw(st.lists(st.sampled_from(clicks), max_size=4)) if clicks else []
    operations = draw(st.permutations([*clicks, *again, *undone, *(("forget", *one) for one in forgotten)]))
    survivors = [
        one
        for one in clicks
        if one.source_position not in undone
        and not any(
            user == one.user and partition == one.source_position[0] and one.source_position[1] <= offset
            for user, partition, offset in forgotten
        )
    ]
    return clicks, operations, survivors


# The second click finds the memory full; when the first one goes, it must come in.
TURNED_AWAY = [click(0, user="v", partition=1), click(0, user="u")]


@settings(deadline=None, max_examples=60)
@given(histories(), st.integers(1, 6), st.booleans())
@example((TURNED_AWAY, [*TURNED_AWAY, ("forget", "v", 1, 0)], TURNED_AWAY[1:]), 1, False)
def test_any_order_of_clicks_undos_and_forgets_leaves_the_bits_of_the_survivors_alone(
    history: tuple[list[Click], list[object], list[Click]], capacity: int, asks_between: bool
) -> None:
    _, operations, survivors = history
    model = Model()
    lived, never_saw = model.feedback(capacity), model.feedback(capacity)
    visible: dict[str, object] = {}
    for operation in operations:
        match operation:
            case Click():
                lived.add([operation])
            case (int() as partition, int() as offset):
                lived.undo([(partition, offset)])
            case (_, user, partition, offset):
                lived.forget(user, {partition: offset})
        if asks_between:
            _take(lived, visible)
    never_saw.add(survivors)
    _take(lived, visible)
    expected: dict[str, object] = {}
    _take(never_saw, expected)
    assert lived.digest() == never_saw.digest()
    assert len(lived) == len(survivors)
    assert visible.keys() == expected.keys()
    items = [f"item-{row}" for row in range(NUM_ITEMS + 1)]
    left, right = (one.states_of(items, share=PAPER, new_share=PAPER) for one in (lived, never_saw))
    assert np.array_equal(left.components, right.components)


def _take(feedback: QueryFeedback, visible: dict[str, object]) -> None:
    """Follow the changes as a voting index does: nothing enters twice, nothing leaves that was not there."""
    changes = feedback.take_changes().memory
    for entry_id in changes.left:
        del visible[entry_id]
    for entry in changes.entered:
        assert entry.entry_id not in visible
        visible[entry.entry_id] = entry


def test_a_click_that_comes_again_under_another_pseudonym_is_that_ones() -> None:
    feedback, renamed = Model().feedback(), Model().feedback()
    feedback.add([click(1, user="old"), click(2, item=1, user="old")])
    renamed.add([click(1, user="new"), click(2, item=1, user="new")])
    feedback.add([click(1, user="new"), click(2, item=1, user="new")])
    assert feedback.digest() == renamed.digest()
    feedback.forget("old", {0: 9})
    assert feedback.digest() != Model().feedback().digest()
    feedback.forget("new", {0: 9})
    assert feedback.digest() == Model().feedback().digest()


def test_a_click_raises_the_item_for_the_same_and_for_a_near_query_alone() -> None:
    model = Model()
    feedback = model.feedback()
    items = [f"item-{row}" for row in range(NUM_ITEMS)]
    feedback.add([click(0, "space movies", item=3)])
    after = feedback.states_of(items, share=PAPER, new_share=PAPER)
    for query in ("space movies", "space films"):
        gained = model.scores(after, query) - model.scores(model.states, query)
        assert gained[3] > 0.02
        assert not np.delete(gained, 3).any()
    assert feedback.take_changes().item_ids == ("item-3",)


def test_for_one_component_states_are_equation_8_and_votes_equation_6_of_the_paper() -> None:
    model = Model(components=1)
    feedback = model.feedback()
    queries = ["space movies", "space films", "a sad film", "toys", "dogs"]
    rows, items = [0, 1, 2, 3, 4, 0], [0, 0, 1, 2, 2, 3]
    feedback.add([click(place, queries[row], item) for place, (row, item) in enumerate(zip(rows, items, strict=True))])
    vectors = np.stack([encode(query, 1)[0] for query in queries])  # type: ignore[index]
    relevant = relevance(np.column_stack([rows, items]), num_queries=5, num_passages=NUM_ITEMS)
    share = SharePolicy(kind="fixed", least=0.3)
    found = feedback.states_of([f"item-{row}" for row in range(NUM_ITEMS)], share=share, new_share=share)
    expected = xs_passages(model.states.components[:, 0], vectors, relevant, 0.3)
    np.testing.assert_allclose(found.components[:, 0], expected, atol=1e-3)

    asked = encode("space toys", 1)
    assert asked is not None
    index = VotingIndex(num_components=1, width=WIDTH, model_version="m")
    index.apply(upserts=feedback.take_changes().memory.entered)
    (votes,) = index.votes(QueryStates(components=asked[None]), 10)
    products = vectors.astype(np.float64) @ asked[0].astype(np.float64)
    given = xl_votes(np.arange(5)[None], products[None], relevant, k=10)
    assert votes == pytest.approx(
        {f"item-{row}": float(vote) for row, vote in zip(given.indices, given.data, strict=True)}, abs=1e-3
    )


def test_a_new_item_gets_a_state_from_its_clicks_and_none_when_they_are_taken_back() -> None:
    model = Model()
    feedback = model.feedback()
    feedback.add([click(0, "toys", item=77)])
    policies = {"share": PAPER, "new_share": SharePolicy(kind="fixed", least=0.5)}
    assert np.linalg.norm(feedback.states_of(["item-77"], **policies).components) > 0.1
    feedback.undo([(0, 0)])
    assert not feedback.states_of(["item-77"], **policies).components.any()


def test_a_query_without_words_counts_and_teaches_nothing() -> None:
    feedback = Model().feedback()
    feedback.add([click(0, "wordless")])
    assert len(feedback) == 1
    changes = feedback.take_changes()
    assert (changes.item_ids, changes.memory.entered) == ((), ())


def test_a_query_that_cannot_be_encoded_leaves_no_half_of_a_click() -> None:
    model = Model()

    def fails(query: str) -> np.ndarray:
        raise RuntimeError(query)

    feedback = QueryFeedback(
        fails, states=model.states, index={}, pair_gate=model.pair_gate, num_query_components=2, capacity=4
    )
    empty = feedback.digest()
    with pytest.raises(RuntimeError):
        feedback.add([click(0)])
    assert (len(feedback), feedback.digest()) == (0, empty)


def test_a_refill_that_cannot_encode_a_query_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_feedback, "_CACHED_QUERIES", 0)
    model, failing = Model(), [False]

    def encodes(query: str) -> np.ndarray | None:
        if failing[0]:
            raise RuntimeError(query)
        return encode(query)

    feedback, without = (
        QueryFeedback(
            encodes, states=model.states, index={}, pair_gate=model.pair_gate, num_query_components=2, capacity=4
        )
        for _ in range(2)
    )
    clicks = [click(offset, user="uv"[offset % 2]) for offset in range(40)]
    feedback.add(clicks)
    feedback.forget("u", {0: 40})
    without.add(one for one in clicks if one.user == "v")
    failing[0] = True
    with pytest.raises(RuntimeError):
        feedback.take_changes()
    failing[0] = False
    assert {entry.entry_id for entry in feedback.take_changes().memory.entered} == {
        entry.entry_id for entry in without.take_changes().memory.entered
    }
    assert feedback.digest() == without.digest()


def test_a_state_of_another_shape_is_refused_naming_both() -> None:
    model = Model()
    feedback = QueryFeedback(
        lambda query: np.ones((3, WIDTH), dtype=np.float32),
        states=model.states,
        index={},
        pair_gate=model.pair_gate,
        num_query_components=2,
        capacity=4,
    )
    with pytest.raises(ValueError, match=r"shape \(3, 16\); the model's have \(2, 16\)"):
        feedback.add([click(0)])


def test_states_with_a_gate_of_their_own_are_refused() -> None:
    states = make_items(np.random.default_rng(0), 3, 2, 2, 8)
    with pytest.raises(ValueError, match=r"states.gate has shape \(3, 4\); allowed: None"):
        QueryFeedback(encode, states=states, index={}, pair_gate=None, num_query_components=2, capacity=4)


def test_bytes_grow_with_clicks_and_shrink_when_they_go() -> None:
    feedback = Model().feedback()
    empty = feedback.nbytes
    feedback.add([click(offset) for offset in range(20)])
    full = feedback.nbytes
    feedback.forget("u", {0: 30})
    assert empty < full
    assert feedback.nbytes < full
