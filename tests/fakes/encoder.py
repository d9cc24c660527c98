"""The encoder's ports in memory: the same rules as Kafka and the inference server have, without either.

The encoder here is a running hash, so a state names exactly the events it was made of.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from fakes.stream import MemoryTopics

from services.contracts.topics.attributions import Attributed
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.histories import HISTORIES, EncodedHistory
from services.contracts.topics.interactions import INTERACTIONS
from services.contracts.topics.search_clicks import ClickRecord
from services.encoder.domain import EncodedStates, EncodeJob
from services.platform.stream.records import DeadLetter, SourceRecord
from services.user_state.forgetting import ForgetTopic
from services.user_state.values import now_ms


class MemoryStream(MemoryTopics):
    """`interactions`: `append` records, read them as a consumer would. histories: the topic beside it."""

    def __init__(self, num_partitions: int = 2) -> None:
        super().__init__({INTERACTIONS: num_partitions})
        self.histories = MemoryTopics({HISTORIES: num_partitions})

    @property
    def log(self) -> list[list[SourceRecord]]:
        """What was written, by partition."""
        return self.logs[INTERACTIONS]

    @log.setter
    def log(self, log: list[list[SourceRecord]]) -> None:
        self.logs[INTERACTIONS] = log

    def append(
        self,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        recorded_ms: int,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> int:
        """Write one record; return its offset."""
        return self.write(INTERACTIONS, key, value, partition=partition, written_ms=recorded_ms, headers=headers)


class MemoryOutbox:
    """Keeps what was published, repetitions included. histories: the topic that `keep` writes to."""

    def __init__(self, histories: MemoryTopics | None = None, clock_ms: Callable[[], int] = now_ms) -> None:
        self.histories, self._clock_ms = histories, clock_ms
        self.attributions: list[Attributed] = []
        self.dead_letters: list[DeadLetter] = []
        self.clicks: list[ClickRecord] = []

    def publish(
        self,
        attributions: Sequence[Attributed],
        dead_letters: Sequence[DeadLetter],
        clicks: Sequence[ClickRecord] = (),
    ) -> None:
        self.attributions += attributions
        self.dead_letters += dead_letters
        self.clicks += clicks

    def keep(self, records: Sequence[EncodedHistory]) -> Sequence[int]:
        topic = self.histories or MemoryTopics(
            {HISTORIES: 1 + max((record.partition for record in records), default=0)}
        )
        return [
            topic.write(HISTORIES, key, value, partition=partition, written_ms=self._clock_ms())
            for partition, key, value in records
        ]

    def close(self) -> None:
        """Nothing is held."""


class MemoryForgetLog(ForgetTopic):
    """The real log on a topic that lives as long as the test."""

    def __init__(self, topic: MemoryTopics | None = None) -> None:
        self._topic = topic or MemoryTopics({FORGETS: 1})
        super().__init__(self._topic)

    def append(self, forget: Forget | None) -> int:
        """Write one record; None is one that cannot be read. Its offset."""
        if forget is None:
            return self._topic.write(FORGETS, None, b"\xff\xff")
        return self._topic.write(FORGETS, forget.user_id.encode(), encode_forget(forget))

    def reader(self) -> "MemoryForgetLog":
        """Another reader of the same log, at its beginning."""
        return MemoryForgetLog(self._topic.reader())


class HashEncoder:
    """A stand-in for the model: the state after n events is a hash of those n events and the user."""

    def __init__(self, width: int = 4) -> None:
        self._width = width
        self.calls: list[int] = []
        self.dropped: list[int] = []

    def check(self) -> None:
        """Always ready."""

    def drop(self, cache_keys: Sequence[int]) -> None:
        self.dropped += cache_keys

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[EncodedStates]:
        self.calls.append(len(jobs))
        return [self._states(job) for job in jobs]

    def _states(self, job: EncodeJob) -> EncodedStates:
        crc = zlib.crc32(str(job.user_index).encode())
        after: list[int] = []
        for item, time in zip(job.item_index.tolist(), job.event_time.tolist(), strict=True):
            crc = zlib.crc32(f"{item}:{time};".encode(), crc)
            after.append(crc)
        # Bytes of the hash, exact in half precision.
        rows = [[(after[p] >> (8 * (column % 4))) & 255 for column in range(self._width)] for p in job.positions]
        return EncodedStates(np.array(rows, dtype=np.float32)[:, None, :], None)
