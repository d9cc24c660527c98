"""Packed values come back as they were, and keys keep one user's together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import state_layout as layout
from services.common.state_layout import RecentId, StoredEvent

ids = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
offsets = st.integers(0, 2**63 - 1)
partitions = st.integers(0, 2**31 - 1)
hashes = st.integers(0, 2**64 - 1)


@given(st.lists(st.builds(StoredEvent, offsets, partitions, offsets, hashes, ids)))
def test_histories_come_back(events: list[StoredEvent]) -> None:
    assert layout.unpack_events(layout.pack_events(events)) == events


@given(st.lists(st.builds(RecentId, hashes, partitions, offsets, st.integers(0, 255), st.just("") | ids)))
def test_recent_ids_come_back(recent: list[RecentId]) -> None:
    assert layout.unpack_recent(layout.pack_recent(recent), layout.pack_recent_items(recent)) == recent


def test_recent_ids_of_an_earlier_version_have_no_items() -> None:
    recent = [RecentId(7, 0, 3, 1), RecentId(8, 0, 4, 0)]
    assert layout.unpack_recent(layout.pack_recent(recent), None) == recent


@given(st.dictionaries(partitions, offsets), st.dictionaries(partitions, offsets))
def test_positions_come_back_in_their_epoch_only(positions: dict[int, int], forgotten: dict[int, int]) -> None:
    packed = layout.pack_positions("e1", positions, forgotten)
    assert layout.unpack_positions("e1", packed) == (positions, forgotten)
    # As an earlier version wrote it.
    assert layout.unpack_positions("e1", layout.pack_positions("e1", positions)) == (positions, {})
    assert layout.unpack_positions("e2", packed) is None
    assert layout.unpack_positions("e1", None) is None


def position(text: str) -> bytes:
    return f"e1|{text}".encode()


@pytest.mark.parametrize(
    ("state", "history", "reached"),
    [
        (position("3:7"), position("3:7"), True),
        (position("3:8"), position("3:7"), True),
        (position("3:6"), position("3:7"), False),
        (position("3:7"), position("3:7,5:0"), False),
        (position("3:7,5:0"), position("3:6,5:0"), True),
        (b"e0|3:7", position("3:7"), False),
        # A state must have been made after the last forget.
        (position("3:7"), position("3:7|3:7"), False),
        (position("3:9|3:7"), position("3:8|3:7"), True),
        # The history is gone, with or without the state's position.
        (position("3:7"), None, False),
        (None, None, False),
        # States of an earlier version: partition 3, offset 7.
        (None, position("3:7"), True),
        (None, position("3:7|3:2"), True),
        (None, position("3:8"), False),
        (None, position("2:1,3:7"), False),
    ],
)
def test_a_state_reaches_a_history_that_it_reflects_whole(
    state: bytes | None, history: bytes | None, reached: bool
) -> None:
    assert layout.reaches(state, 3, 7, history) is reached


@given(ids, ids)
def test_users_never_share_a_key(one: str, other: str) -> None:
    keys = {layout.history_key(one), layout.history_key(other), layout.seen_key(one), layout.state_key(one, "m")}
    assert len(keys) == (3 if one == other else 4)


@given(ids)
def test_the_hash_tag_holds_the_whole_user(user_id: str) -> None:
    for key in (layout.history_key(user_id), layout.seen_key(user_id), layout.state_key(user_id, "m")):
        tag = key[key.index("{") + 1 : key.index("}")]
        assert tag
        assert key.startswith("u:{" + tag + "}:")
        assert "}" not in key[key.index("}") + 1 :]


def test_event_ids_are_told_apart_by_64_bits() -> None:
    assert len({layout.hash_event_id(f"event-{n}") for n in range(10_000)}) == 10_000
