"""What the refresher needs from outside: the log, the topics it writes, and where checkpoints are kept; leases are
`services.platform.leases`.

Each port has a real adapter and an in-memory one. All raise the error tree of `services.platform.errors`. Everything is
synchronous: the refresher has a thread of its own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.contracts.topics.index_deltas import IndexDelta
from services.platform.stream.record import DeadLetter
from services.refresher.domain.records import Entry, Interaction, Listing


@dataclass(slots=True)
class Polled:
    """What one poll brought: entries per partition of `attributions`, in order, and listings of `items`.

    traceparents: of the spans that wrote them, as far as they are traced.
    """

    entries: dict[int, list[Entry]] = field(default_factory=dict)
    listings: list[Listing] = field(default_factory=list)
    traceparents: Collection[str] = ()


class Log(Protocol):
    """`attributions` and `items`. For one thread."""

    def partitions(self) -> Sequence[int]:
        """All partitions of `attributions`."""

    def listings(self) -> Sequence[Listing]:
        """Everything that `items` holds now; polls go on behind it."""

    def assign(self, offsets: Mapping[int, int]) -> None:
        """Poll these partitions alone from now on, each from its offset; `items` goes on where it is."""

    def poll(self, timeout_ms: int) -> Polled:
        """The next records; empty when none came in time. What retention took is skipped."""

    def bounds(self, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        """First offset still there, and one past the last record."""

    def known_ends(self) -> Mapping[int, int]:
        """One past the last record of each assigned partition as far as polling has told, without asking."""

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        """The interactions that lie at these offsets.

        Raises: PreconditionFailed when one of them is not there any more or holds no interaction;
        DependencyUnavailable.
        """

    def close(self) -> None:
        """Give the connections up; the next call makes new ones."""


class Outbox(Protocol):
    """What the refresher writes. Returns once everything is acknowledged; a failure may leave some of it written."""

    def publish(
        self, deltas: Sequence[IndexDelta], unreadable: Sequence[DeadLetter], tombstones: Sequence[bytes] = ()
    ) -> None:
        """Write the tombstones of these keys, then deltas in order, and what could not be read to the dead letters."""

    def close(self) -> None:
        """Give the connections up; the next call makes new ones."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that is kept. name: for messages. read: its values and parts, whole; raises CheckpointError saying
    what is wrong where, or DependencyUnavailable. is_base: once read, its parts may be named in `Checkpoints.save`."""

    name: str
    read: Callable[[], tuple[Mapping[str, Any], Mapping[str, bytes]]]
    is_base: bool = True


class Checkpoints(Protocol):
    """Where checkpoints are kept. Methods may be called from several threads."""

    def save(self, partition: int, values: Mapping[str, Any], parts: Mapping[str, bytes | None]) -> None:
        """Keep this as the newest; the one before stays as the older one. A part that is None is as it was in what this
        object saved last, or read last. values: JSON.

        Raises: DependencyUnavailable; Conflict when another one has opened the partition meanwhile: then nothing of
        what was kept may be named any more.
        """

    def load(self, partition: int) -> Iterator[Kept]:
        """Open a partition: whoever had it open cannot save any more. What is kept, newest first."""

    def close(self) -> None:
        """Give the connections up; the next call makes new ones."""
