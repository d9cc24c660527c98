"""Folding a partition: exactly once, in any cut, undone and forgotten exactly: the batch over what survives."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes.refresher import MemoryLog
from hypothesis import given, settings
from hypothesis import strategies as st
from refresher_scene import (
    START_MS,
    Interaction,
    contributors_of,
    fold_all,
    interaction,
    log_of,
    make_rules,
    random_records,
    survivors,
)

from services.platform.errors import DependencyUnavailable, PreconditionFailed
from services.platform.stream.records import pack_position
from services.refresher.domain.partition import Partition
from services.refresher.domain.records import Entry, Forgetting, Undo
from services.refresher.handlers.fold import FoldRecords

RULES = make_rules()


def fold_in_cuts(log: MemoryLog, cuts: Sequence[int], rules=RULES, listed=None) -> Partition:
    state = Partition(0, rules, {} if listed is None else listed)
    fold = FoldRecords(log)
    for start, end in zip([0, *cuts], [*cuts, len(log.entries[0])], strict=True):
        fold.fold(state, log.entries[0][start:end])
    return state


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 120), max_size=6).map(sorted))
def test_any_cut_of_the_log_ends_in_the_same_digest(seed: int, cuts: list[int]) -> None:
    log = log_of(random_records(seed, 120))
    assert fold_in_cuts(log, cuts).digest() == fold_all(RULES, log).digest()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_state_is_the_batch_over_what_survives(seed: int) -> None:
    """The capacity is below the number of interactions and removals outrun the reserve, so refills are in it."""
    rules = make_rules(max_remembered=8)
    records = random_records(seed, 150, users=4)
    live = fold_all(rules, log_of(records))
    batch = fold_all(rules, log_of(survivors(records)))
    assert live.sums.digest() == batch.sums.digest()
    assert live.remembered.memory.digest() == batch.remembered.memory.digest()
    assert contributors_of(live) == contributors_of(batch)
    assert not live.remembered.memory.wants_refill


def test_a_memory_that_removals_emptied_takes_what_comes_whatever_its_hash() -> None:
    """All that survives is held, yet the memory had turned others away: it has to open up again."""
    rules = make_rules(max_remembered=3)
    rng = np.random.default_rng(14)
    crowd = [interaction(rng, place=(0, n), item="item-1", user="crowd") for n in range(40)]
    few = [interaction(rng, place=(1, n), item="item-2", user="few") for n in range(2)]
    late = [interaction(rng, place=(1, 10 + n), item="item-3", user="few") for n in range(2)]
    state = fold_all(rules, log_of([*crowd, *few, Forgetting(0, "crowd", {0: 100}), *late]))
    assert state.remembered.memory.digest() == fold_all(rules, log_of([*few, *late])).remembered.memory.digest()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), order=st.randoms(use_true_random=False))
def test_order_of_the_records_does_not_matter_to_sums_and_memory(seed: int, order) -> None:
    records = random_records(seed, 80)
    shuffled = list(records)
    order.shuffle(shuffled)
    one, other = fold_all(RULES, log_of(records)), fold_all(RULES, log_of(shuffled))
    assert one.sums.digest() == other.sums.digest()
    assert one.remembered.memory.digest() == other.remembered.memory.digest()


def test_other_models_are_counted_by_version_and_never_mixed() -> None:
    rng = np.random.default_rng(4)
    mine = interaction(rng, place=(0, 1), item="item-1", user="u")
    # A re-encoded interaction has the same place under the new model's version.
    other = interaction(rng, place=(0, 1), item="item-1", user="u", model="model-b")
    mixed = fold_all(RULES, log_of([other, mine, other]))
    assert mixed.other_models == {"model-b": 2}
    assert mixed.sums.digest() == fold_all(RULES, log_of([mine])).sums.digest()


def test_interactions_without_weight_are_neither_summed_nor_remembered_and_can_be_undone() -> None:
    rng = np.random.default_rng(5)
    indifferent = interaction(rng, place=(0, 1), item="item-1", user="u", kind="rating", value=3.0)
    state = fold_all(RULES, log_of([indifferent]))
    assert len(state.ledger) == 1
    assert len(state.sums) == len(state.remembered.memory) == 0
    log = log_of([indifferent, Undo(0, indifferent.source_position, "item-1", "u")])
    assert len(fold_all(RULES, log).ledger) == 0


class _Broken(MemoryLog):
    """Fails to read again, as often as told."""

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__()
        self.failures, self.error = failures, error

    def read_again(self, partition, offsets):
        if self.failures:
            self.failures -= 1
            raise self.error
        return super().read_again(partition, offsets)


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_a_log_that_fails_to_be_read_again_leaves_a_state_right_for_its_position(failures: int) -> None:
    rules = make_rules(max_remembered=4)
    records = random_records(7, 150, users=3)
    log = _Broken(failures, DependencyUnavailable("away"))
    for record in records:
        log.append(0, record)
    state, fold, raised = Partition(0, rules, {}), FoldRecords(log), 0
    while state.folded_offset < len(records) - 1:
        try:
            # Polls are small, so that records have to be read again; the log's own copy is not at hand.
            start = state.folded_offset + 1
            fold.fold(state, log.entries[0][start : start + 3])
        except DependencyUnavailable:
            raised += 1
    fold.mend(state)
    assert raised == failures
    assert state.digest() == fold_all(rules, log_of(records)).digest()


def test_records_that_the_log_has_lost_stop_the_fold_instead_of_leaving_sums_half_right() -> None:
    rng = np.random.default_rng(8)
    one = interaction(rng, place=(0, 1), item="item-1", user="u")
    log = _Broken(1, PreconditionFailed("gone"))
    log.append(0, one)
    log.append(0, Undo(0, one.source_position, "item-1", "u"))
    state, fold = Partition(0, RULES, {}), FoldRecords(log)
    fold.fold(state, log.entries[0][:1])
    with pytest.raises(PreconditionFailed):
        fold.fold(state, log.entries[0][1:])
    assert state.folded_offset == 0
    assert sum(state.sums.counts(list(state.sums))) == 1


def test_unknown_items_are_parked_and_folded_once_listed() -> None:
    rng = np.random.default_rng(9)
    records = [
        interaction(rng, place=(0, n), item="new" if n % 2 else "item-3", user=f"u{n}", moment_ms=START_MS + n)
        for n in range(10)
    ]
    listed: dict[str, bool] = {}
    log = log_of(records)
    state = fold_all(RULES, log, listed=listed)
    assert "new" not in state.sums
    assert state.counts["unknown_item"] == 5
    assert len(state.pending) == 5
    listed["new"] = False
    FoldRecords(log).mend(state)
    assert len(state.pending) == 0
    assert state.digest() == fold_all(RULES, log, listed={"new": False}).digest()


def test_parked_interactions_can_be_undone_and_forgotten() -> None:
    rng = np.random.default_rng(10)
    records: list[Entry] = [interaction(rng, place=(0, n), item="new", user=f"u{n % 2}") for n in range(6)]
    records += [Undo(0, pack_position(0, 1), "new", "u1"), Forgetting(0, "u0", {0: 100})]
    listed: dict[str, bool] = {}
    log = log_of(records)
    state = fold_all(RULES, log, listed=listed)
    assert len(state.pending) == 2
    listed["new"] = False
    FoldRecords(log).mend(state)
    assert state.digest() == fold_all(RULES, log, listed={"new": False}).digest()
    assert state.sums.of(["new"]).counts.tolist() == [2]


def test_a_flood_of_unknown_items_is_bounded_and_the_same_whatever_the_cut() -> None:
    rng = np.random.default_rng(11)
    rules = make_rules(max_pending=10)
    log = log_of([interaction(rng, place=(0, n), item=f"made-up-{n % 40}", user="u") for n in range(200)])
    whole, cut = fold_all(rules, log), fold_in_cuts(log, [3, 50, 51, 120], rules)
    assert len(whole.pending) <= 10
    assert sorted(whole.pending) == sorted(cut.pending)
    assert whole.pending.evicted_from == cut.pending.evicted_from
    # What is parked is complete: of an item all its interactions, or none.
    for item in whole.pending:
        assert len(whole.pending.offsets(item)) == 5
        assert not whole.pending.may_lack(item)


def test_the_component_that_names_the_user_leaves_no_trace() -> None:
    rules = make_rules(leave_out=P_LAST)
    rng = np.random.default_rng(12)
    one = interaction(rng, place=(0, 1), item="item-1", user="u")
    state = fold_all(rules, log_of([one]))
    (entry,) = state.remembered.visible.values()
    assert not entry.components[P_LAST].any()
    values = np.frombuffer(one.query.components, "<f2").reshape(-1, rules.items.width).copy()
    values[P_LAST] = 0
    blind = Interaction(**{name: getattr(one, name) for name in one.__slots__} | {"query": _packed(one, values)})
    assert fold_all(rules, log_of([blind])).sums.digest() == state.sums.digest()


P_LAST = 2


def _packed(one: Interaction, values: np.ndarray):
    query = one.query
    return replace(query, components=values.tobytes())
