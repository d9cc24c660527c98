"""The store answers again a little older than it was, under the same epoch, while the encoder runs.

So it is when the client reconnects by itself to a replica that lagged, or when half of a cluster is restored from an
older file. The in-memory store is kinder than Redis: it never goes back. `FragileStore.fall_back_to` makes it an older
copy of itself; the conditions of every write are those of the Lua scripts.
"""

from collections.abc import Callable

from answers import recommend, silently_shown
from fakes.encoder import MemoryStream
from state_scene import EncoderProcess, FragileStore, append_all, replay


def after_failover() -> tuple[MemoryStream, FragileStore]:
    """Two events are applied and copied to the replica, three more are applied; then the replica takes over and a sixth
    event comes. The encoder never stops."""
    return _after(lambda store, older: store.fall_back_to(older))


def _after(lose: Callable[[FragileStore, FragileStore], None]) -> tuple[MemoryStream, FragileStore]:
    stream, store = MemoryStream(1), FragileStore()
    process = EncoderProcess(stream, store)
    append_all(stream, "ab")
    process.settle()
    older = store.older_copy()
    append_all(stream, "cde", first=2)
    process.settle()
    assert store.contents() == replay(stream)
    lose(store, older)
    append_all(stream, "f", first=5)
    process.settle()
    return stream, store


def test_a_failover_to_a_replica_that_lags_loses_no_event() -> None:
    """The counts agree: six records are counted as applied, three of them are in the history."""
    stream, store = after_failover()
    assert store.contents() == replay(stream)


async def test_after_a_failover_an_answer_shows_nothing_seen_or_says_so() -> None:
    _, store = after_failover()
    answer, _ = await recommend(store, offset=5)
    assert silently_shown(answer, seen="abcdef") == []


def test_users_that_go_back_while_the_progress_stays_are_restored() -> None:
    """The users' keys and the progress key lie in different hash slots, so on different nodes of a cluster; one of them
    fails over."""
    stream, store = _after(lambda store, older: store.fall_back_to(older, progress=False))
    assert store.contents() == replay(stream)


def test_a_watermark_that_goes_back_while_the_users_stay_changes_nothing() -> None:
    """The other half of the cluster: records are delivered again, and their positions are known."""
    stream, store = _after(lambda store, older: store.fall_back_to(older, users=False))
    assert store.contents() == replay(stream)
