"""Packed values come back as they were, and keys keep one user's together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from services.contracts import stored_history
from services.contracts.stored_history import RecentId, StoredEvent
from services.platform.errors import PreconditionFailed
from services.user_state import layout

ids = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
offsets = st.integers(0, 2**63 - 1)
partitions = st.integers(0, 2**31 - 1)
hashes = st.integers(0, 2**64 - 1)
NOW_MS = 1_800_000_000_000


texts = st.just("") | ids
numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.builds(StoredEvent, offsets, partitions, offsets, hashes, ids, texts, numbers, texts)))
def test_histories_come_back(events: list[StoredEvent]) -> None:
    assert stored_history.unpack_events(stored_history.pack_events(events)) == events


def test_what_holds_for_all_events_is_stored_once() -> None:
    one = StoredEvent(NOW_MS, 3, 7, 2**63, "item-1", "rating", 4.5, "shown-1")
    many = [one._replace(event_time_ms=NOW_MS + n, offset=7 + n, id_hash=2**63 + n) for n in range(100)]
    assert stored_history.unpack_events(stored_history.pack_events(many)) == many
    # Per event: an item, an exposure, 8 bytes of a hash, two differences.
    assert len(stored_history.pack_events(many)) < 100 * (7 + 8 + 8 + 2) + 60


@pytest.mark.parametrize("version", [1, 3])
def test_a_history_of_another_version_is_refused(version: int) -> None:
    with pytest.raises(PreconditionFailed, match=f"a history has format {version}, this version reads 2"):
        stored_history.unpack_events(bytes([version]) + b"\1\0\0\0")


@pytest.mark.parametrize("epoch", ["0123456789abcdef", "0123-x", "0123-", "8"])
def test_an_epoch_of_another_version_is_refused(epoch: str) -> None:
    with pytest.raises(PreconditionFailed, match=f"stream:epoch='{epoch}' in the state store; allowed: <random>-<part"):
        layout.home_of("ann", epoch)


@given(st.lists(st.builds(RecentId, hashes, partitions, offsets, st.integers(0, 255), texts)))
def test_recent_ids_come_back(recent: list[RecentId]) -> None:
    assert stored_history.unpack_recent(stored_history.pack_recent(recent)) == recent


@given(st.dictionaries(partitions, offsets), st.dictionaries(partitions, offsets))
def test_positions_come_back_in_their_epoch_only(positions: dict[int, int], forgotten: dict[int, int]) -> None:
    packed = layout.pack_positions("e1", positions, forgotten)
    assert layout.unpack_positions("e1", packed) == (positions, forgotten)
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
        # A state that does not say what it reflects.
        (None, position("3:7"), False),
    ],
)
def test_a_state_reaches_a_history_that_it_reflects_whole(
    state: bytes | None, history: bytes | None, reached: bool
) -> None:
    assert layout.reaches(state, history) is reached


@given(ids, ids, st.integers(1, 64))
def test_users_never_share_a_key(one: str, other: str, partitions: int) -> None:
    homes = [layout.home_of(user_id, f"e-{partitions}") for user_id in (one, other)]
    keys = {layout.history_key(homes[0]), layout.history_key(homes[1]), layout.seen_key(homes[0])}
    keys.add(layout.state_key(homes[0], "m"))
    assert len(keys) == (3 if one == other else 4)


@given(ids, st.integers(1, 64))
def test_a_users_keys_share_the_slot_of_the_home_partition(user_id: str, partitions: int) -> None:
    home = layout.home_of(user_id, f"e-{partitions}")
    assert 0 <= home.partition < partitions
    slot = key_slot(layout.progress_key(home.partition).encode())
    keys = (layout.history_key(home), layout.seen_key(home), layout.state_key(home, "m"))
    assert {key_slot(key.encode()) for key in (*keys, layout.users_key(home.partition))} == {slot}


def test_event_ids_are_told_apart_by_64_bits() -> None:
    assert len({stored_history.hash_event_id(f"event-{n}") for n in range(10_000)}) == 10_000
