"""Ports of the refresher: the log, the topics it writes, and checkpoints.

Each has a real and an in-memory adapter.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.contracts.topics.index_deltas import IndexDelta
from services.platform.stream.records import DeadLetter
from services.refresher.domain.records import Entry, Interaction, Listing


@dataclass(slots=True)
class Polled:
    """The result of a poll: entries by partition of `attributions`, listings of `items`, and traceparents."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)
    listings: list[Listing] = field(default_factory=list)
    traceparents: Collection[str] = ()


class Log(Protocol):
    """Reads the topics `attributions` and `items`. It is not thread-safe."""

    def partitions(self) -> Sequence[int]:
        """Return all partitions of `attributions`."""

    def listings(self) -> Sequence[Listing]:
        """Return all listings in `items`. Later polls continue after them."""

    def assign(self, offsets: Mapping[int, int]) -> None:
        """Poll only these partitions, each from its offset, and `items`."""

    def poll(self, timeout_ms: int) -> Polled:
        """Return the next records, if any arrive within the timeout. Records that retention deleted are skipped."""

    def bounds(self, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        """Return each partition's first offset and end offset (one past its last record)."""

    def known_ends(self) -> Mapping[int, int]:
        """Each assigned partition's end offset, as polled."""

    def read_again(self, partition: int, offsets: Sequence[int]) -> Mapping[int, Interaction]:
        """The interactions at these offsets.

        Raises: PreconditionFailed if one is gone or is not an interaction; DependencyUnavailable.
        """

    def close(self) -> None:
        """Close the connections; the next call connects again."""


class Outbox(Protocol):
    """Writes the refresher's topics, and waits for acknowledgements. A failure may leave some records written."""

    def publish(
        self, deltas: Sequence[IndexDelta], unreadable: Sequence[DeadLetter], tombstones: Sequence[bytes] = ()
    ) -> None:
        """Write tombstones of these keys, then deltas in order, then dead letters."""

    def close(self) -> None:
        """Close the connections; the next call connects again."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint to read.

    `read` returns values and parts. It raises CheckpointError or DependencyUnavailable. If `is_base`, then after
    `read`, `Checkpoints.save` may refer to the checkpoint's parts.
    """

    name: str
    read: Callable[[], tuple[Mapping[str, Any], Mapping[str, bytes]]]
    is_base: bool = True


class Checkpoints(Protocol):
    """Stores checkpoints. It is thread-safe."""

    def save(self, partition: int, values: Mapping[str, Any], parts: Mapping[str, bytes | None]) -> None:
        """Save the newest checkpoint, and keep the previous one.

        A part that is None is unchanged since this object's last save or read. `values` are JSON values.

        Raises: DependencyUnavailable; Conflict if another process opened the partition meanwhile.
        """

    def load(self, partition: int) -> Iterator[StoredCheckpoint]:
        """Open a partition and return its checkpoints, newest first. A previous owner can no longer save."""

    def close(self) -> None:
        """Close the connections; the next call connects again."""
