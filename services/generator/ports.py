"""What the generator needs from outside: text encoders.

They raise the error tree of `services.platform.errors`. Topics are read through `services.contracts.topic_reader`.
"""

from collections.abc import Sequence
from typing import Protocol

from services.algorithms.states import FloatArray


class TextEncoder(Protocol):
    """A model of the text bundle, wherever it runs. Thread-safe."""

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """The model's output for B texts (B >= 1), (B, rows, width) float32.

        Raises: PreconditionFailed for another model or values of NaN.
        """

    def close(self) -> None:
        """Give connections and memory back."""
