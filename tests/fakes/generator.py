"""The generator's ports in memory."""

from collections.abc import Sequence

import numpy as np
from fakes.stream import MemoryTopics

from services.algorithms.states import FloatArray
from services.common.errors import DependencyUnavailable
from services.common.stream.topics.search_clicks import SEARCH_CLICKS


class MemoryClicks(MemoryTopics):
    """`search-clicks`, written by a test."""

    def __init__(self) -> None:
        super().__init__({SEARCH_CLICKS: 1})
        (self.log,) = self.logs[SEARCH_CLICKS]

    def append(self, value: bytes | None, key: bytes | None = None) -> int:
        """Write one record; its offset."""
        return self.write(SEARCH_CLICKS, key, value)


class MemoryEncoder:
    """Fixed outputs by text; a text that has none fails as an inference server that is away does."""

    def __init__(self, outputs: dict[str, FloatArray]) -> None:
        self.outputs = outputs
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> FloatArray:
        self.calls.append(list(texts))
        if missing := [text for text in texts if text not in self.outputs]:
            raise DependencyUnavailable(f"no output for {missing[0]!r}")
        return np.stack([self.outputs[text] for text in texts])

    def close(self) -> None:
        """Nothing to give back."""
