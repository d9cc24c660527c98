"""A catalogue that changes while it answers: against a dictionary that is changed alike, and its versions by name."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from between_lines import read_between_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_scene import make_items, make_pair_gate, make_queries, unit

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable.index import IndexFullError
from services.algorithms.indexes.mutable.snapshot import SnapshotError, load_snapshot
from services.algorithms.item_table.attributes import AttributeTable
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.attributes import Comparison, Condition, Kind, Values
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import ItemStates

P_Q, P_X, D = 2, 2, 4
GATE = make_pair_gate(np.random.default_rng(0), P_Q * P_X, 6)
QUERY = make_queries(np.random.default_rng(1), 1, P_Q, P_X, D)
IDS = [f"i{row}" for row in range(8)]
STATES = make_items(np.random.default_rng(2), 8, P_Q, P_X, D)


@dataclass(frozen=True, kw_only=True)
class Change:
    item_id: str
    components: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    gate: np.ndarray | None = None
    model_share: float = 0.5
    num_interactions: int = 3
    dropped: bool = False


@dataclass(frozen=True, kw_only=True)
class Description:
    item_id: str
    title: str = ""
    categories: Sequence[str] = ()
    attributes: Values = field(default_factory=dict)
    is_served: bool = True


def refreshed(item_id: str, seed: int) -> Change:
    rng = np.random.default_rng(1000 + seed)
    return Change(
        item_id=item_id,
        components=unit(rng.normal(size=(P_X, D))),
        gate=rng.normal(size=P_Q * P_X).astype(np.float32),
        model_share=0.25,
        num_interactions=seed,
    )


def base() -> Catalogue:
    return Catalogue(
        model_version="m",
        item_ids=IDS,
        titles=[f"Title {item_id}" for item_id in IDS],
        categories=[("even",) if row % 2 == 0 else ("odd",) for row in range(8)],
        states=STATES,
        pair_gate=GATE,
        attributes=AttributeTable.of(
            {"price": Kind.NUMBER, "language": Kind.TAG},
            [{"price": float(row), "language": "en" if row < 4 else "de"} if row else {} for row in range(8)],
        ),
    )


def live(**changes: object) -> LiveCatalogue:
    build = lambda items: {"brute_force": BruteForce(items)}  # noqa: E731
    return LiveCatalogue(base(), build=build, **changes)  # type: ignore[arg-type]


def answer(catalogue: LiveCatalogue, wanted: ItemFilter | None = None, name: str = "") -> dict[str, float]:
    """Everything that a search finds, with s, best first."""
    served = catalogue.version_named(name)[0] if name else catalogue.served
    top = served.version.search(QUERY, 100, wanted)
    return dict(zip(top.item_ids[0], top.scores[0].tolist(), strict=False))


@pytest.fixture
def catalogue() -> LiveCatalogue:
    return live()


def test_attributes_are_the_bundles_until_they_are_described(catalogue: LiveCatalogue) -> None:
    cheap = ItemFilter(where=[Condition("price", Comparison.AT_MOST, (2.0,))])
    french = ItemFilter(where=[Condition("language", Comparison.ONE_OF, ("fr",))])
    assert set(answer(catalogue, cheap)) == {"i1", "i2"}
    catalogue.apply(1, [refreshed("i2", 1), refreshed("later", 2)])
    catalogue.describe(
        [
            Description(item_id="i7", attributes={"price": 0.5, "language": "fr"}),
            Description(item_id="i1", attributes={"language": "en"}),
            Description(item_id="later", attributes={"price": 2.0}),
        ]
    )
    for _ in range(2):
        assert set(answer(catalogue, cheap)) == {"i2", "i7", "later"}
        assert set(answer(catalogue, french)) == {"i7"}
        assert catalogue.passing(cheap, ["i1", "i2", "later", "i6"]).tolist() == [False, True, True, False]
        catalogue.index.merge()
    catalogue.describe([Description(item_id="i7", is_served=False)])
    catalogue.describe([Description(item_id="i7", attributes={"price": 1.0})])
    assert set(answer(catalogue, cheap)) == {"i2", "i7", "later"}
    assert not answer(catalogue, french)


def test_a_description_that_says_what_the_bundle_says_is_not_held(catalogue: LiveCatalogue) -> None:
    base = catalogue.base
    other = Description(item_id="i1", title="Other", categories=["z"], attributes={"price": 1.0})
    catalogue.describe([other, Description(item_id="i2", is_served=False)])
    same = [
        Description(
            item_id=item_id, title=base.titles[row], categories=base.categories[row],
            attributes=base.attributes.of_row(row),
        )
        for row, item_id in enumerate(IDS)
    ]  # fmt: skip
    held = [weakref.ref(one) for one in same]
    catalogue.describe(same)
    del same
    assert [one() for one in held] == [None] * len(IDS)
    assert catalogue.categories_of(IDS) == list(base.categories)
    assert [catalogue.title_of(item_id) for item_id in IDS] == list(base.titles)
    assert set(answer(catalogue, ItemFilter())) == set(IDS)


def score(components: np.ndarray, gate: np.ndarray) -> float:
    states = ItemStates(components=components[None], gate=gate[None])
    return float(mol_scores_reference(QUERY, states, GATE)[0, 0])


def base_score(item_id: str) -> float:
    assert STATES.gate is not None
    row = IDS.index(item_id)
    return score(STATES.components[row], STATES.gate[row])


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("changed", ["i2", "new", "withdrawn"])
def test_a_snapshot_of_changed_items_has_their_states(
    catalogue: LiveCatalogue, tmp_path: Path, changed: str, is_merged: bool
) -> None:
    withdrawal = [Description(item_id="i2", is_served=False)]
    if changed == "withdrawn":
        catalogue.describe(withdrawal)
    else:
        catalogue.apply(1, [refreshed(changed, 1)])
    if is_merged:
        catalogue.index.merge()
    snapshot = load_snapshot(catalogue.capture(written_s=1)(tmp_path), model_version="m", base=base().batch)
    loaded = live(snapshot=snapshot)
    if changed == "withdrawn":
        loaded.describe(withdrawal)
    assert answer(loaded) == answer(catalogue)


def test_a_snapshot_with_states_longer_than_1_is_refused(tmp_path: Path) -> None:
    poisoned = live()
    poisoned.apply(1, [replace(refreshed("i3", 1), components=np.full((P_X, D), 3e38, dtype=np.float32))])
    snapshot = load_snapshot(poisoned.capture(written_s=1)(tmp_path), model_version="m")
    with pytest.raises(SnapshotError, match=r"has length inf; allowed: at most 1\.001"):
        live(snapshot=snapshot)


def test_why_an_item_has_no_state_is_told(catalogue: LiveCatalogue) -> None:
    catalogue.describe([Description(item_id="i1", is_served=False), Description(item_id="put", title="Put")])
    assert [catalogue.absence_of(item_id) for item_id in ("i1", "put", "other")] == [
        "is withdrawn or not available",
        "has no state yet: it has had no interaction since it was put, and no state was made from its text",
        "is no item of this index",
    ]


def test_a_reader_finds_a_version_at_each_moment_of_a_reset() -> None:
    catalogue = live(max_versions=4)
    catalogue.apply(1, [refreshed("i3", 1)])
    catalogue.apply(2, [refreshed("i4", 2)])
    before = catalogue.served.name
    found: set[tuple[str, str, bool]] = set()

    def read() -> None:
        found.add((catalogue.served.name, catalogue.version_named(before)[0].name, catalogue.may_come("elsewhere", 3)))

    read_between_lines(catalogue.reset, read, file="algorithms/items/live_catalogue.py")
    read()
    plain = catalogue.base.index_version
    assert found == {(before, before, True), (plain, plain, True)}


def test_an_older_interaction_does_not_make_the_index_look_older(catalogue: LiveCatalogue) -> None:
    catalogue.apply(1, [refreshed("i1", 1)], newest_recorded_ms=9_000, lag_s=0.1)
    catalogue.apply(2, [refreshed("i2", 1)], newest_recorded_ms=4_000, lag_s=5.0)
    assert (catalogue.served.newest_recorded_ms, catalogue.served.lag_s) == (9_000, 0.1)


def test_a_state_of_another_shape_is_left_out_and_named(catalogue: LiveCatalogue) -> None:
    wrong = [
        Change(item_id="i1", components=np.ones((1, D), dtype=np.float32), gate=np.ones(4, dtype=np.float32)),
        Change(item_id="i2", components=np.ones((P_X, D), dtype=np.float32)),
        Change(item_id="i4", components=np.ones((P_X, D), dtype=np.float32), gate=np.ones(3, dtype=np.float32)),
    ]
    assert catalogue.apply(3, [*wrong, refreshed("i5", 1)]) == ("i1", "i2", "i4")
    found = answer(catalogue)
    assert found["i1"] == pytest.approx(base_score("i1"))
    assert found["i5"] != pytest.approx(base_score("i5"))


def test_of_several_changes_of_an_item_in_a_batch_the_last_counts(catalogue: LiveCatalogue) -> None:
    """Also where an earlier one drops the item or does not fit the model."""
    wrong = Change(item_id="i2", components=np.zeros((P_X, D + 1), dtype=np.float32))
    dropped = [Change(item_id=item_id, dropped=True) for item_id in ("i1", "i3")]
    last = [refreshed(f"i{row}", row) for row in range(3)]
    batch = [refreshed("i0", 9), dropped[0], wrong, refreshed("i3", 3), *last, dropped[1]]
    other = live()
    assert catalogue.apply(1, batch) == other.apply(1, last) == ()
    assert answer(catalogue) == answer(other)
    for item_id in ("i0", "i1", "i2", "i3"):
        one, two = catalogue.explain(item_id), other.explain(item_id)
        assert one is not None
        assert two is not None
        assert (one.model_share, one.num_interactions) == (two.model_share, two.num_interactions)


def test_an_item_withdrawn_while_states_are_in_flight_returns_with_what_it_learnt(catalogue: LiveCatalogue) -> None:
    catalogue.apply(1, [refreshed("i1", 1)])
    catalogue.describe([Description(item_id="i1", is_served=False), Description(item_id="later", is_served=False)])
    latest, later = refreshed("i1", 2), refreshed("later", 3)
    catalogue.apply(2, [latest, later])
    assert not {"i1", "later"} & set(answer(catalogue))
    assert catalogue.is_hidden("i1")
    assert catalogue.explain("i1") is None
    catalogue.describe([Description(item_id="i1"), Description(item_id="later", categories=("odd",))])
    assert latest.gate is not None
    assert answer(catalogue)["i1"] == pytest.approx(score(latest.components, latest.gate))
    assert set(answer(catalogue, ItemFilter(allow_categories=["odd"]))) == {"i3", "i5", "i7", "later"}
    assert catalogue.served.position == 2


def test_versions_answer_as_they_did_as_long_as_they_are_kept() -> None:
    catalogue = live(max_versions=3)
    then: dict[str, dict[str, float]] = {}
    for position in range(5):
        then[catalogue.served.name] = answer(catalogue)
        catalogue.apply(10 * position, [refreshed("i1", position)])
    then[catalogue.served.name] = answer(catalogue)
    names = list(then)
    for name in names[-3:]:
        served, is_it = catalogue.version_named(name)
        assert (served.name, is_it) == (name, True)
        assert answer(catalogue, name=name) == then[name]
    for name in names[:-3]:
        assert catalogue.version_named(name, 10)[0].name == names[-3]
        assert not catalogue.version_named(name, 10)[1]
        assert not catalogue.may_come(name, 10)
    assert catalogue.version_named("of another process", 31)[0].name == names[-2]
    assert catalogue.version_named("of another process")[0].name == names[-1]
    assert catalogue.may_come("of another process", 999)
    assert catalogue.may_come("of another process")
    assert not catalogue.may_come(names[-1], 999)


def test_a_batch_in_the_same_place_of_another_log_makes_a_version_of_another_name() -> None:
    one, other = live(), live()
    one.apply(7, [refreshed("i1", 1)], mark="aa")
    other.apply(7, [refreshed("i1", 2)], mark="bb")
    assert one.served.position == other.served.position
    assert not other.version_named(one.served.name, 7)[1]
    other.reset()
    other.apply(7, [refreshed("i1", 1)], mark="aa")
    assert other.version_named(one.served.name, 7) == (other.served, True)
    assert answer(other) == answer(one)


def test_an_item_is_explained_with_its_base_and_its_evidence(catalogue: LiveCatalogue) -> None:
    one = refreshed("i1", 7)
    catalogue.apply(4, [one, refreshed("new", 2)])
    item = catalogue.explain("i1")
    assert item is not None
    np.testing.assert_array_equal(item.state.components[0], one.components)
    assert item.base is not None
    np.testing.assert_array_equal(item.base.components[0], STATES.components[1])
    assert (item.model_share, item.num_interactions, item.title) == (0.25, 7, "Title i1")
    untouched, new = catalogue.explain("i2"), catalogue.explain("new")
    assert untouched is not None
    assert (untouched.model_share, untouched.num_interactions) == (1.0, 0)
    assert new is not None
    assert new.base is None
    assert catalogue.explain("nowhere") is None


def test_a_change_beyond_the_memory_limit_changes_nothing_and_withdrawals_still_work(catalogue: LiveCatalogue) -> None:
    catalogue.index.max_bytes = catalogue.index.memory.total
    before, name = answer(catalogue), catalogue.served.name
    with pytest.raises(IndexFullError, match="max_bytes"):
        catalogue.apply(1, [refreshed("i1", 1)])
    assert (answer(catalogue), catalogue.served.name) == (before, name)
    catalogue.describe([Description(item_id="i1", is_served=False)])
    assert "i1" not in answer(catalogue)
    with pytest.raises(IndexFullError, match="max_bytes"):
        catalogue.describe([Description(item_id="i1"), Description(item_id="i2", is_served=False)])
    assert not {"i1", "i2"} & set(answer(catalogue))
    catalogue.index.max_bytes = None
    catalogue.describe([Description(item_id="i1")])
    assert answer(catalogue)["i1"] == pytest.approx(base_score("i1"))


steps = st.one_of(
    st.tuples(st.just("refresh"), st.sampled_from([*IDS, "x", "y"]), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.sampled_from([*IDS, "x", "y"]), st.just(0)),
    st.tuples(st.just("hide"), st.sampled_from([*IDS, "x", "y"]), st.just(0)),
    st.tuples(st.just("show"), st.sampled_from([*IDS, "x", "y"]), st.integers(0, 2)),
    st.tuples(st.just("merge"), st.just(""), st.just(0)),
)


@given(st.lists(steps, max_size=25))
@settings(deadline=None, max_examples=60)
def test_any_order_of_changes_ends_where_a_dictionary_does(changes: list[tuple[str, str, int]]) -> None:
    catalogue = live()
    states: dict[str, Change] = {}
    hidden: set[str] = set()
    described: dict[str, str] = {}
    for position, (what, item_id, number) in enumerate(changes):
        name = catalogue.served.name
        if what == "refresh":
            states[item_id] = refreshed(item_id, number)
            catalogue.apply(position, [states[item_id]], newest_recorded_ms=5_000, lag_s=0.5)
        elif what == "drop":
            states.pop(item_id, None)
            catalogue.apply(position, [Change(item_id=item_id, dropped=True)])
        elif what == "merge":
            catalogue.index.merge()
            assert catalogue.served.name == name
            assert not catalogue.served.version.delta()
            assert catalogue.version_named(name)[1]
        else:
            (hidden.add if what == "hide" else hidden.discard)(item_id)
            described[item_id] = f"c{number}"
            description = Description(
                item_id=item_id, title=f"T{number}", categories=[f"c{number}"], is_served=what == "show"
            )
            catalogue.describe([description])
        if what in ("refresh", "drop"):
            assert catalogue.served.name == f"{catalogue.base.index_version}+{position}"
            assert catalogue.served.position == position
    wanted = {item_id: base_score(item_id) for item_id in IDS}
    for item_id, one in states.items():
        assert one.gate is not None
        wanted[item_id] = score(one.components, one.gate)
    wanted = {item_id: found for item_id, found in wanted.items() if item_id not in hidden}
    assert answer(catalogue) == pytest.approx(wanted)
    of = {item_id: "odd" if number % 2 else "even" for number, item_id in enumerate(IDS)} | described
    for category in ("even", "c1"):
        found = answer(catalogue, ItemFilter(allow_categories=[category]))
        assert found == pytest.approx({item_id: s for item_id, s in wanted.items() if of.get(item_id) == category})
    for item_id in wanted.keys() & described.keys():
        assert catalogue.title_of(item_id) == f"T{described[item_id][1:]}"
    if any(what == "refresh" for what, _, _ in changes):
        assert (catalogue.served.newest_recorded_ms, catalogue.served.lag_s) == (5_000, 0.5)
