"""The generator's ports in memory."""

import threading
from collections.abc import Sequence

import numpy as np

from services.algorithms.states import FloatArray
from services.common.errors import DependencyUnavailable
from services.common.stream.record import SourceRecord
from services.common.topics import SEARCH_CLICKS


class MemoryClicks:
    """A topic that a test writes to; `is_away` makes every call fail."""

    def __init__(self) -> None:
        self.records: list[SourceRecord] = []
        self.letters: list[tuple[int, str]] = []
        self.is_away = False
        self._at = 0
        self._written = threading.Condition()

    def append(self, value: bytes | None, key: bytes | None = None) -> int:
        """Write one record; its offset."""
        with self._written:
            self.records.append(SourceRecord(SEARCH_CLICKS, 0, len(self.records), 0, key, value))
            self._written.notify_all()
            return len(self.records) - 1

    def make_anew(self) -> None:
        """Another topic of the same name, empty."""
        with self._written:
            self.records.clear()
            self._at = 0

    def open(self) -> int:
        self._check()
        return len(self.records)

    def seek(self, offset: int) -> None:
        self._check()
        self._at = offset

    def poll(self, timeout_s: float) -> Sequence[SourceRecord]:
        self._check()
        with self._written:
            self._written.wait_for(lambda: len(self.records) > self._at, timeout_s)
            found = self.records[self._at :]
            self._at = len(self.records)
            return found

    def position(self) -> int:
        self._check()
        return self._at

    def set_aside(self, record: SourceRecord, reason: str) -> None:
        self._check()
        self.letters.append((record.offset, reason))

    def close(self) -> None:
        """Nothing to give back."""

    def _check(self) -> None:
        if self.is_away:
            raise DependencyUnavailable("the topic is away")


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
