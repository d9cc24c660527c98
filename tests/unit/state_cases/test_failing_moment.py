"""Two seconds without memory, or a version that cannot read the histories: good records end as dead letters.

The loop is the real one with its own limits: three attempts in 150 ms, then record by record. Time passes only where it
waits, so work takes none.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
from fakes.encoder import HashEncoder, MemoryStream
from state_scene import EncoderProcess, FragileStore, LoopClock, append, interaction, replay
from structlog.testing import capture_logs

from services.encoder.consumer import ConsumerLimits
from services.encoder.domain import EncodedStates, EncodeJob

EVENTS = 3_000
USERS = [f"user-{number}" for number in range(500)]


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """A stack trace per record would take longer than the outage."""
    with capture_logs():
        yield


def filled_stream() -> MemoryStream:
    """Six events of each user, one round after the other."""
    stream = MemoryStream(1)
    for number in range(EVENTS):
        item, user = "abcdef"[number // len(USERS)], USERS[number % len(USERS)]
        append(stream, interaction(item, user=user, event_id=f"e{number}", second=number))
    return stream


class ShortOfMemory(HashEncoder):
    """The model in this process raises MemoryError for the first two seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: Callable[[], float] = lambda: 0.0

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        if self.clock() < 2.0:
            raise MemoryError("no memory left for the batch")
        return super().encode(jobs)


def is_through(process: EncoderProcess, last: int) -> bool:
    return process.store.progress([0], process.store.epoch() or "")[0].watermark == last


def test_two_seconds_without_memory_cost_no_event() -> None:
    stream, store, model = filled_stream(), FragileStore(), ShortOfMemory()
    process = EncoderProcess(stream, store, model=model, limits=ConsumerLimits())
    clock = LoopClock(lambda: is_through(process, EVENTS - 1))
    model.clock = lambda: clock.now_s
    process.run(clock)
    assert process.set_aside() == []
    assert store.contents(USERS) == replay(stream, USERS)


def test_a_rollback_to_a_version_that_cannot_read_the_histories_stops_and_waits() -> None:
    """A newer version wrote the histories; this version runs for a while; then the newer one comes back. The in-memory
    store keeps histories as objects: here loading one raises what `state_layout` raises on the newer format."""
    users = USERS[:5]
    stream, store = MemoryStream(1), FragileStore()
    for number, user in enumerate(users):
        append(stream, interaction("a", user=user, event_id=f"{user}-a", second=number))
    EncoderProcess(stream, store).settle()
    for number, user in enumerate(users):
        append(stream, interaction("b", user=user, event_id=f"{user}-b", second=10 + number))
    store.newer_format, served = True, store.contents(users)
    older = EncoderProcess(stream, store, limits=ConsumerLimits())
    older.run(LoopClock(lambda: is_through(older, 9), limit_s=2.0))
    assert store.contents(users) == served
    store.newer_format = False
    EncoderProcess(stream, store).settle()
    assert older.set_aside() == []
    assert store.contents(users) == replay(stream, users)
