"""The mutable index: what batches do, what it refuses, what readers see while it changes."""

import threading

import numpy as np
import pytest
from mutable_scene import MODEL, Build, States

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.mutable import index as mutable
from services.algorithms.indexes.mutable.background_merge import BackgroundMerge
from services.algorithms.indexes.mutable.index import MERGE_ROWS, IndexFullError, MutableIndex, only
from services.algorithms.indexes.mutable.item_batch import ItemBatch
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import ItemStates, QueryStates


@pytest.fixture
def states() -> States:
    return States(np.random.default_rng(0), p_q=2, p_x=2, d=6)


def batch(states: States, item_ids: list[str], numbers: list[int] | None = None, **more: object) -> ItemBatch:
    rows = numbers if numbers is not None else list(range(len(item_ids)))
    return ItemBatch(item_ids=item_ids, states=states.of(rows), **more)  # type: ignore[arg-type]


def make_index(states: States, count: int = 0, *, build: Build = BruteForce, **more: object) -> MutableIndex:
    ids = [f"i{row:05d}" for row in range(count)]
    first = batch(states, ids, [row % len(states) for row in range(count)])
    return MutableIndex(first, states.pair_gate, model_version=MODEL, build=only(build), **more)  # type: ignore[arg-type]


def held(index: MutableIndex, states: States, wanted: ItemFilter | None = None) -> list[str]:
    return sorted(index.version.search(states.query([0]), 10**6, wanted).item_ids[0])


def test_an_empty_index_answers_exactly_nothing_until_an_item_comes(states: States) -> None:
    index = make_index(states)
    answer = index.version.search(states.query([0, 1]), 5)
    assert answer.item_ids == ((), ())
    assert answer.scores.shape == (2, 0)
    assert [found.kind for found in answer.certificates] == ["exact", "exact"]
    index.apply(upserts=batch(states, ["a"]))
    assert index.version.search(states.query([0]), 5).item_ids == (("a",),)


def test_each_batch_makes_one_version_and_equal_histories_make_equal_ones(states: States) -> None:
    first, second = make_index(states, 3), make_index(states, 3)
    names = [first.version.name]
    for index in (first, second):
        index.apply(upserts=batch(states, ["a"]))
        index.apply(removals=["a"])
    names += [first.version.name]
    assert first.version.name == second.version.name
    assert first.version.number == 2
    second.apply(upserts=batch(states, ["a"]))
    first.apply(upserts=batch(states, ["a"], [1]))
    assert first.version.number == second.version.number
    assert len({*names, first.version.name, second.version.name}) == 4
    assert index.version.search(states.query([0]), 1).version == second.version.name


def test_what_changes_nothing_keeps_the_version(states: States) -> None:
    index = make_index(states, 4)
    name = index.version.name
    assert index.apply(removals=["ghost"]).version == name
    index.merge()
    assert index.version.name == name


def test_a_change_copies_no_earlier_one(states: States) -> None:
    index = make_index(states, 3)
    index.apply(upserts=batch(states, ["a"]))
    before = index.version
    index.apply(upserts=batch(states, ["b"]))
    assert index.version.tail.tail is before.tail.tail
    assert not index.version.blocks
    assert before.num_items == 4


def test_a_merge_that_fails_leaves_the_index_as_it_was(states: States) -> None:
    def refuse_two(scorer):
        if scorer.num_items == 2:
            raise ValueError("too few training points")
        return BruteForce(scorer)

    index = make_index(states, build=refuse_two)
    index.apply(upserts=batch(states, ["a", "b"]))
    with pytest.raises(ValueError, match="too few training points"):
        index.merge()
    assert held(index, states) == ["a", "b"]
    assert index.memory.building == 0
    index.apply(upserts=batch(states, ["c"]))
    index.merge()
    assert held(index, states) == ["a", "b", "c"]
    assert index.memory.delta == make_index(states).memory.delta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"upserts": batch(s, ["a", "b", "a"])}, "item_ids holds 'a' more than once"),
        (lambda s: {"removals": ["a", "a"]}, "removals holds 'a' more than once"),
        (lambda s: {"upserts": batch(s, ["a"]), "removals": ["a"]}, "item 'a' is both in upserts and in removals"),
        (lambda s: {"upserts": batch(s, [""])}, "item_ids holds '' of 0 bytes; allowed: 1-128"),
        (lambda s: {"removals": ["ä" * 65]}, "of 130 bytes; allowed: 1-128"),
        (lambda s: {"upserts": batch(s, ["\ud800"])}, "is not UTF-8"),
        (lambda s: {"upserts": batch(s, ["a", "b"], [0])}, "2 item ids but states of 1 items"),
        (lambda s: {"upserts": batch(s, ["a"], categories=[])}, "1 item ids but categories of 0 items"),
        (
            lambda s: {
                "upserts": ItemBatch(item_ids=["a"], states=ItemStates(components=np.ones((1, 2, 7), np.float32)))
            },
            "items have 2 components of width 7; the index holds 2 of width 6",
        ),
        (
            lambda s: {
                "upserts": ItemBatch(item_ids=["a"], states=ItemStates(components=np.ones((1, 3, 6), np.float32)))
            },
            "items have 3 components of width 6; the index holds 2 of width 6",
        ),
        (
            lambda s: {
                "upserts": ItemBatch(item_ids=["a"], states=ItemStates(components=np.ones((1, 2, 6), np.float32)))
            },
            "items.gate is absent but the index's items have one",
        ),
        (
            lambda s: {
                "upserts": ItemBatch(
                    item_ids=["a"],
                    states=ItemStates(components=np.ones((1, 2, 6), np.float32), gate=np.ones((1, 6), np.float32)),
                )
            },
            "items.gate has 6 pairs; the index holds 4",
        ),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_by_name_and_changes_nothing(states, change, message) -> None:
    index = make_index(states, 3)
    name = index.version.name
    with pytest.raises(ValueError, match=message):
        index.apply(**change(states))
    assert index.version.name == name


def test_algorithms_by_name_share_one_changing_catalogue(states: States) -> None:
    def build(scorer: MolScorer) -> dict[str, Index]:
        return {"all": BruteForce(scorer), "few": TopKAvg(scorer, pool_size=1)}

    ids = [f"i{row:05d}" for row in range(100)]
    index = MutableIndex(batch(states, ids), states.pair_gate, model_version=MODEL, build=build)
    one = make_index(states, 100, build=lambda scorer: TopKAvg(scorer, pool_size=1))
    assert index.memory.main - one.memory.main <= 0  # the states are held once
    index.apply(upserts=batch(states, ["n"], [200]))
    query = states.query([0])
    assert index.version.search(query, 101, algorithm="all").item_ids == index.version.search(query, 101).item_ids
    assert index.version.search(query, 1).certificates[0].kind == "exact"
    assert index.version.search(query, 1, algorithm="few").certificates[0].kind != "exact"
    assert len(index.version.first_stage(query, 5, algorithm="few").item_ids[0]) == 5
    for call in (index.version.search, index.version.first_stage):
        with pytest.raises(ValueError, match="algorithm='most' allowed: all, few"):
            call(query, 5, algorithm="most")


def test_a_memory_limit_refuses_growth_but_lets_updates_go_on_forever(states: States) -> None:
    index = make_index(states, 2000)
    limit = 3 * index.memory.main
    index = make_index(states, 2000, max_bytes=limit)
    peak = 0
    for step in range(30):
        ids = [f"i{row:05d}" for row in range(step * 50, step * 50 + 400)]
        index.apply(upserts=batch(states, ids, [step] * 400))
        peak = max(peak, index.memory.total)
    assert peak <= limit
    assert index.num_items == 2000
    refusal = ""
    for step in range(100):
        try:
            index.apply(upserts=batch(states, [f"new-{step}-{row}" for row in range(300)]))
        except IndexFullError as error:
            refusal = str(error)
            break
        peak = max(peak, index.memory.total)
    assert f"max_bytes={limit} but 300 more items make" in refusal
    assert peak <= limit
    name = index.version.name
    index.apply(removals=[f"i{row:05d}" for row in range(600)])
    index.apply(upserts=batch(states, [f"more-{row}" for row in range(300)]))  # what was removed makes room
    assert index.version.name != name


def test_memory_counts_every_part(states: States) -> None:
    index = make_index(states, 1000)
    state_bytes = 4 * (2 * 6 + 4)
    before = index.memory
    assert before.main > 1000 * state_bytes
    assert before.building == 0
    index.apply(upserts=batch(states, [f"n{row}" for row in range(300)]))
    assert index.memory.delta - before.delta > 300 * state_bytes
    assert index.memory.main == pytest.approx(before.main, rel=0.01)
    seen = []
    index.merge(lambda: seen.append(index.memory))
    assert min(memory.building for memory in seen) > 1300 * state_bytes
    assert index.memory.building == 0
    assert index.memory.delta == before.delta
    assert index.memory.main > 1300 * state_bytes


def _circle(angles: np.ndarray) -> ItemStates:
    return ItemStates(components=np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)[:, None, :])


def test_readers_in_threads_never_see_half_a_batch() -> None:
    """Each batch moves all ten twins and removes or brings back one pair; a twin's angle says which batch it was."""
    step_angle, twins = 1e-3, [f"twin-{row}" for row in range(10)]
    others = _circle(np.linspace(2, 3, 3000))
    index = MutableIndex(
        ItemBatch(
            item_ids=[*twins, *(f"other-{row}" for row in range(3000))],
            states=ItemStates(components=np.concatenate([_circle(np.zeros(10)).components, others.components])),
        ),
        None,
        model_version=MODEL,
        build=only(BruteForce),
    )
    query = QueryStates(components=np.array([[[1.0, 0.0]]], dtype=np.float32))
    failures: list[str] = []
    searches = [0, 0, 0]
    writing = threading.Event()
    writing.set()

    def read(reader: int) -> None:
        newest = -1
        while writing.is_set():
            answer = index.version.search(query, 12)
            batch_number = int(answer.version.rpartition(".")[2].partition("-")[0])
            found = dict(zip(answer.item_ids[0], answer.scores[0].tolist(), strict=True))
            shown = {item_id for item_id in found if not item_id.startswith("other")}
            expected = {*twins, *(["pair-a", "pair-b"] if batch_number % 2 else [])}
            scores = np.array([found[item_id] for item_id in shown])
            if shown != expected or np.abs(scores - np.cos(step_angle * (batch_number % 1000))).max() > 1e-6:
                failures.append(f"version {answer.version}: {found}")
                return
            if batch_number < newest:
                failures.append(f"version {batch_number} after {newest}")
                return
            newest = batch_number
            searches[reader] += 1

    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(3)]
    with BackgroundMerge(index) as background:
        for reader in readers:
            reader.start()
        number = 0
        while (number < 600 or background.merges < 2 or min(searches) < 50) and not failures:
            number += 1
            ids = [*twins, *(["pair-a", "pair-b"] if number % 2 else [])]
            states = _circle(np.full(len(ids), step_angle * (number % 1000)))
            index.apply(
                upserts=ItemBatch(item_ids=ids, states=states), removals=[] if number % 2 else ["pair-a", "pair-b"]
            )
            if number % 100 == 0:
                index.merge_wanted.set()
        writing.clear()
        for reader in readers:
            reader.join()
    assert not failures


def test_a_merge_is_wanted_when_enough_has_changed_and_not_again_for_what_it_covers(states: States) -> None:
    index = make_index(states, 100)
    index.apply(upserts=batch(states, [f"n{row}" for row in range(MERGE_ROWS - 1)], [0] * (MERGE_ROWS - 1)))
    assert not index.merge_wanted.is_set()
    index.apply(upserts=batch(states, ["one more"]))
    assert index.merge_wanted.is_set()
    index.merge_wanted.clear()

    def change() -> None:
        index.apply(upserts=batch(states, ["i00000"]))

    index.merge(change)
    assert not index.merge_wanted.is_set()


def test_a_large_delta_becomes_one_block_with_the_algorithms_long_before_a_tenth_has_changed(
    states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutable, "CODED_ROWS", 600)
    index = make_index(states, 24 * 600)
    main = index.version.main

    def put(name: str, count: int) -> None:
        index.apply(upserts=batch(states, [f"{name}{row:05d}" for row in range(count)], [0] * count))

    def blocks() -> list[tuple[int, bool]]:
        return [(len(block.segment), bool(block.segment.indexes)) for block in index.version.blocks]

    put("n", 599)
    assert not index.merge_wanted.is_set()
    put("one", 1)
    assert index.merge_wanted.is_set()
    index.merge_wanted.clear()
    index.tidy()
    assert (blocks(), index.merge_wanted.is_set()) == ([(600, True)], False)
    # What comes later is not joined to it before there is as much again.
    put("m", 599)
    assert (blocks(), index.merge_wanted.is_set()) == ([(600, True), (599, False)], False)
    put("another", 1)
    assert index.merge_wanted.is_set()
    index.tidy()
    assert blocks() == [(1200, True)]
    assert main is not None
    assert index.version.main is not None
    assert index.version.main.segment is main.segment


def test_a_background_merge_that_fails_says_why_and_is_tried_again_until_it_succeeds(states: States) -> None:
    failing, tried, merged = threading.Event(), threading.Semaphore(0), threading.Event()
    failing.set()

    def build(scorer):
        tried.release()
        if failing.is_set():
            raise ValueError("no algorithm for this one")
        merged.set()
        return BruteForce(scorer)

    index = make_index(states, build=build)
    index.apply(upserts=batch(states, ["a"]))
    background = BackgroundMerge(index, first_retry_s=0.001, longest_retry_s=0.004)
    background.start()
    index.merge_wanted.set()
    for _ in range(4):
        assert tried.acquire(timeout=10)
    assert isinstance(background.error, ValueError)
    assert held(index, states) == ["a"]
    index.apply(upserts=batch(states, ["b"]))
    failing.clear()
    assert merged.wait(10)
    background.close()
    assert (background.error, background.merges) == (None, 1)
    assert held(index, states) == ["a", "b"]
    assert index.version.main is not None


def test_closing_does_not_wait_for_the_next_try_and_raises_what_the_last_one_did(states: States) -> None:
    tried = threading.Event()

    def refuse(scorer):
        tried.set()
        raise ValueError("no algorithm for this one")

    index = make_index(states, build=refuse)
    index.apply(upserts=batch(states, ["a"]))
    background = BackgroundMerge(index, first_retry_s=3600)
    background.start()
    index.merge_wanted.set()
    assert tried.wait(10)
    with pytest.raises(ValueError, match="no algorithm"):
        background.close()
    assert held(index, states) == ["a"]
