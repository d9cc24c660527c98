"""What the generator needs from outside: text encoders, and the topic of clicks.

Both raise the error tree of `services.common.errors`. The topic `items` is read by services/common/catalogue_*.
"""

from collections.abc import Sequence
from typing import Protocol

from services.algorithms.states import FloatArray
from services.common.stream.record import SourceRecord


class TextEncoder(Protocol):
    """A model of the text bundle, wherever it runs. Thread-safe."""

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """The model's output for B texts (B >= 1), (B, rows, width) float32.

        Raises: DependencyUnavailable, DeadlineExceeded; PreconditionFailed for another model or values of NaN.
        """

    def close(self) -> None:
        """Give connections and memory back."""


class ClicksTopic(Protocol):
    """`search-clicks`, for one thread. Every method raises DependencyUnavailable when Kafka does not answer."""

    def open(self) -> int:
        """Connect, and return one past the last record."""

    def seek(self, offset: int) -> None:
        """Go on reading there."""

    def poll(self, timeout_s: float) -> Sequence[SourceRecord]:
        """What has come, in order; waits at most so long. Where the topic was made anew, it comes from its start."""

    def position(self) -> int:
        """The next offset to be read."""

    def set_aside(self, record: SourceRecord, reason: str) -> None:
        """Write a record that cannot be read to the dead letters, unless that was done before."""

    def close(self) -> None:
        """Give the connections up; `open` makes new ones."""
