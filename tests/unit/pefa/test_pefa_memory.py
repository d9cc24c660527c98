"""The bounded memory: a function of what survives, whatever the order and whoever was there in between."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pefa_scene import make_scene

from services.algorithms.pefa.memory import MemoryEntry, QueryMemory, arrays_of, entries_of_arrays, hash_of


def memory(capacity: int, reserve: int | None = None) -> QueryMemory:
    return QueryMemory(capacity=capacity, num_components=3, width=8, reserve=reserve)


def smallest(entries: list[MemoryEntry], capacity: int) -> list[str]:
    """The definition: ids of the entries with the smallest hashes."""
    return [
        entry_id for _, entry_id in sorted((hash_of(entry.entry_id), entry.entry_id) for entry in entries)[:capacity]
    ]


def ids(held: QueryMemory) -> list[str]:
    return [entry.entry_id for entry in held]


@given(st.integers(0, 2**32 - 1), st.integers(0, 80), st.integers(1, 20), st.integers(0, 10))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_it_holds_the_survivors_with_the_smallest_hashes_in_any_order(
    seed: int, count: int, capacity: int, reserve: int
) -> None:
    entries = make_scene(seed, count).entries()
    rng = np.random.default_rng(seed)
    held = memory(capacity, reserve)
    surviving: dict[str, MemoryEntry] = {}
    for row in rng.permutation(count):
        surviving[entries[row].entry_id] = entries[row]
        held.add([entries[row]])
        if surviving and rng.random() < 0.3:
            gone = rng.choice(sorted(surviving))
            del surviving[gone]
            held.remove([gone, "never-there"])
    wanted = smallest(list(surviving.values()), capacity)
    if held.wants_refill:
        # What is missing is missing from the end: below the bound everything that survives is there.
        assert ids(held) == wanted[: len(held)]
        held.refill(surviving.values())
    assert ids(held) == wanted
    never = memory(capacity, 0)
    never.add([surviving[entry_id] for entry_id in sorted(surviving)])
    assert held.digest() == never.digest()
    assert not held.wants_refill


@given(st.integers(0, 2**32 - 1), st.integers(1, 80))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_forgotten_user_leaves_the_digest_of_never_having_been_seen(seed: int, count: int) -> None:
    scene = make_scene(seed, count, num_users=8)
    entries = scene.entries()
    user = scene.users[seed % count]
    seen, never = memory(10, 40), memory(10, 40)
    seen.add(entries)
    gone = [entry.entry_id for entry, of in zip(entries, scene.users, strict=True) if of == user]
    seen.remove(gone)
    assert not any(entry_id in seen for entry_id in gone)
    others = [entry for entry in entries if entry.entry_id not in gone]
    never.add(reversed(others))
    if seen.wants_refill:
        seen.refill(others)
    assert seen.digest() == never.digest()


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(0, 6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_its_changes_add_up_to_what_is_visible(seed: int, count: int, reserve: int) -> None:
    entries = make_scene(seed, count).entries()
    rng = np.random.default_rng(seed)
    held = memory(7, reserve)
    served: dict[str, MemoryEntry] = {}
    removed: set[str] = set()
    for place, entry in enumerate(entries, 1):
        held.add([entry])
        removed.discard(entry.entry_id)
        if rng.random() < 0.3:
            gone = entries[int(rng.integers(count))].entry_id
            removed.add(gone)
            held.remove([gone])
        if held.wants_refill and rng.random() < 0.5:
            held.refill([one for one in entries[:place] if one.entry_id not in removed])
        if rng.random() < 0.4:
            changes = held.take_changes()
            assert not {entry.entry_id for entry in changes.entered} & set(served)
            for entry_id in changes.left:
                del served[entry_id]
            served.update({entry.entry_id: entry for entry in changes.entered})
            assert sorted(served) == sorted(ids(held))
    nothing = held.take_changes(), held.take_changes()
    assert nothing[1].entered == nothing[1].left == ()


def test_an_entry_counts_once_however_often_it_is_offered() -> None:
    entries = make_scene(1, 30).entries()
    held = memory(10, 5)
    held.add(entries)
    before = held.digest()
    held.add(entries)
    assert held.digest() == before
    assert len(held) == 10
    assert not held.admits(ids(held)[0])


def test_it_says_beforehand_what_it_would_turn_away() -> None:
    entries = make_scene(2, 200).entries()
    held = memory(10, 5)
    for entry in entries:
        admitted = held.admits(entry.entry_id)
        held.add([entry])
        assert (entry.entry_id in held) == admitted
    assert len(held) == 10


def test_memory_stays_bounded() -> None:
    held = memory(10, 5)
    held.add(make_scene(3, 500).entries())
    assert held.nbytes == 15 * held.bytes_per_entry
    assert held.bytes_per_entry >= 2 * 3 * 8
    assert memory(1000).reserve == 125


@pytest.mark.parametrize("asked_beforehand", [False, True])
def test_without_reserve_a_removal_wants_a_refill_only_if_something_had_been_turned_away(
    asked_beforehand: bool,
) -> None:
    entries = make_scene(4, 12).entries()
    roomy, tight = memory(12, 0), memory(11, 0)
    for held in (roomy, tight):
        held.add(entry for entry in entries if not asked_beforehand or held.admits(entry.entry_id))
        held.remove([ids(held)[3]])
    assert not roomy.wants_refill
    assert tight.wants_refill


@given(st.integers(0, 2**32 - 1), st.integers(0, 60))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_checkpoint_restores_the_reserve_and_the_bound_too(seed: int, count: int) -> None:
    scene = make_scene(seed, count + 20)
    entries = scene.entries()
    held = memory(8, 4)
    held.add(entries[:count])
    restored = QueryMemory.restored(
        [entry for _, entry in held.held()],
        capacity=held.capacity,
        reserve=held.reserve,
        num_components=held.num_components,
        width=held.width,
        bound=held.bound,
    )
    assert restored.digest() == held.digest()
    assert restored.take_changes().entered == ()
    for one in (held, restored):
        one.remove(entry.entry_id for entry, user in zip(entries, scene.users, strict=True) if user == "user-1")
        one.add(entries[count:])
    assert restored.digest() == held.digest()
    assert restored.wants_refill == held.wants_refill
    assert restored.bound == held.bound


@pytest.mark.parametrize("name", ["text", "text_ends", "components", "weights", "event_seconds"])
def test_torn_entries_are_refused(name: str) -> None:
    held = memory(8)
    held.add(make_scene(5, 20).entries())
    arrays = arrays_of([entry for _, entry in held.held()], held.num_components, held.width)
    with pytest.raises(ValueError, match=r"expected|text holds"):
        entries_of_arrays({**arrays, name: arrays[name][:-1]})


@pytest.mark.parametrize(
    ("components", "weight", "message"),
    [
        (np.zeros((3, 8), np.float32), 1.0, "float32; expected"),
        (np.zeros(8, np.float16), 1.0, "shape"),
        (np.full((3, 8), np.nan, np.float16), 1.0, "'0-1': components holds NaN"),
        (np.zeros((3, 8), np.float16), np.inf, "'0-1': weight=inf"),
    ],
)
def test_entries_that_cannot_be_are_refused(components: np.ndarray, weight: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryEntry(
            entry_id="0-1", item_id="a", components=components, weight=weight, interaction_type="", event_seconds=0
        )


def test_entries_of_another_shape_and_sizes_that_cannot_be_are_refused() -> None:
    entry = make_scene(6, 1, d=4).entries()[0]
    with pytest.raises(ValueError, match=r"has components \(3, 4\); this memory holds \(3, 8\)"):
        memory(5).add([entry])
    with pytest.raises(ValueError, match="capacity=0 allowed: at least 1"):
        memory(0)
    with pytest.raises(ValueError, match="reserve=-1 allowed: 0 or more"):
        memory(1, -1)
