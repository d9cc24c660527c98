"""The ports in memory: the same rules as Kafka, Redis and the inference server have, without any of them.

For tests, for trying the consumer without a stack, and (the store) for encoding everything again. The encoder here is a
running hash, so a state names exactly the events it was made of.
"""

import secrets
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.common.errors import Conflict
from services.common.forgets import Forget
from services.common.search_clicks import ClickRecord
from services.common.state_store import AdvanceStep, Progress, StoredState, UserHistory, UserKeys, UserUpdate
from services.common.stream.in_memory import MemoryTopics
from services.common.stream.record import DeadLetter, SourceRecord
from services.common.topics import FORGETS, INTERACTIONS
from services.encoder.domain import Attributed, EncodedStates, EncodeJob
from services.encoder.forgetting import ForgetRecord


class MemoryStream(MemoryTopics):
    """`interactions`: `append` records, read them as a consumer would."""

    def __init__(self, num_partitions: int = 2) -> None:
        super().__init__({INTERACTIONS: num_partitions})

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
    """Keeps what was published, repetitions included."""

    def __init__(self) -> None:
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

    def close(self) -> None:
        """Nothing is held."""


class MemoryForgetLog:
    """A log of forgets that lives as long as the test: each reader has a place of its own (`reader`)."""

    def __init__(self, log: list[ForgetRecord] | None = None) -> None:
        self.log: list[ForgetRecord] = [] if log is None else log
        self._next = 0

    def append(self, forget: Forget | None, reason: str = "") -> None:
        """Write one record; None is one that cannot be read."""
        record = SourceRecord(FORGETS, 0, len(self.log), 0, None if forget is None else forget.user_id.encode(), b"")
        self.log.append(ForgetRecord(record, forget, reason))

    def reader(self) -> "MemoryForgetLog":
        """Another reader of the same log, at its beginning."""
        return MemoryForgetLog(self.log)

    def read(self) -> Sequence[ForgetRecord]:
        found = self.log[self._next :]
        self._next = len(self.log)
        return found

    def close(self) -> None:
        """Nothing is held."""


class MemoryStore:
    """Users and progress with the same conditions on every write as the Lua scripts have."""

    def __init__(self, max_seen: int = 2_000) -> None:
        self._max_seen = max_seen
        self._epoch: str | None = None
        self._held = False
        self._positions: dict[str, tuple[str, dict[int, int], dict[int, int]]] = {}
        self._histories: dict[str, UserHistory] = {}
        self._progress: dict[int, tuple[str, Progress]] = {}
        self._forgets: dict[str, tuple[str, int]] = {}
        self.seen: dict[str, dict[str, int]] = {}
        self.states: dict[tuple[str, str], StoredState] = {}

    def wipe(self) -> None:
        """Lose everything, as a Redis without persistence does when it restarts."""
        self.__init__(self._max_seen)  # type: ignore[misc]

    def epoch(self) -> str | None:
        return self._epoch

    def ensure_epoch(self) -> tuple[str, bool]:
        made = self._epoch is None
        if self._epoch is None:
            self._epoch = secrets.token_hex(8)
        return self._epoch, made

    def add_model(self, model_version: str) -> None:
        """Every state names its model here."""

    def hold(self, seconds: int) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False

    def is_held(self) -> bool:
        return self._held

    def progress(self, partitions: Collection[int], epoch: str) -> Mapping[int, Progress]:
        return {partition: self._progress_of(partition, epoch) for partition in partitions}

    def load_users(self, user_ids: Collection[str], epoch: str) -> Mapping[str, UserHistory]:
        found: dict[str, UserHistory] = {}
        for user_id in user_ids:
            current = self._positions.get(user_id)
            expected = repr(current).encode() if current else b""
            if current and current[0] == epoch:
                stored = self._histories[user_id]
                found[user_id] = UserHistory(
                    events=list(stored.events),
                    recent=list(stored.recent),
                    positions=dict(current[1]),
                    forgotten=dict(current[2]),
                    expected=expected,
                )
            else:
                found[user_id] = UserHistory(expected=expected)
        return found

    def apply(self, updates: Sequence[UserUpdate], epoch: str) -> None:
        lost = 0
        for update in updates:
            current = self._positions.get(update.user_id)
            if (repr(current).encode() if current else b"") != update.expected:
                lost += 1
                continue
            self._positions[update.user_id] = (epoch, dict(update.positions), dict(update.forgotten))
            self._histories[update.user_id] = UserHistory(events=list(update.events), recent=list(update.recent))
            self._note_seen(update)
            key = (update.user_id, update.model_version)
            if update.state_change == "set" and update.state is not None:
                self.states[key] = update.state
            elif update.state_change == "drop":
                self.states.pop(key, None)
        if lost:
            raise Conflict(f"{lost} of {len(updates)} users were changed by another writer")

    def forget(self, updates: Sequence[UserUpdate], epoch: str) -> None:
        lost = 0
        for update in updates:
            current = self._positions.get(update.user_id)
            if (repr(current).encode() if current else b"") != update.expected:
                lost += 1
                continue
            self._positions.pop(update.user_id, None)
            self._histories.pop(update.user_id, None)
            self.seen.pop(update.user_id, None)
            for key in [key for key in self.states if key[0] == update.user_id]:
                del self.states[key]
            if update.expected:
                self.apply([replace(update, expected=b"")], epoch)
        if lost:
            raise Conflict(f"{lost} of {len(updates)} users were changed by another writer")

    def forgets_applied(self, reader: str, epoch: str) -> int:
        written, offset = self._forgets.get(reader, ("", -1))
        return offset if written == epoch else -1

    def set_forgets_applied(self, reader: str, offset: int, epoch: str) -> None:
        self._forgets[reader] = (epoch, offset)

    async def read_keys(self, user_id: str) -> UserKeys:
        stored = self._histories.get(user_id, UserHistory())
        return UserKeys(
            history_events=len(stored.events),
            seen_items=len(self.seen.get(user_id, ())),
            state_model_versions=tuple(sorted(version for user, version in self.states if user == user_id)),
        )

    def advance(self, steps: Sequence[AdvanceStep], epoch: str) -> None:
        lost = []
        for step in steps:
            current = self._progress_of(step.partition, epoch)
            if current.watermark != step.from_watermark:
                lost.append(step.partition)
                continue
            counts = Counter(current.counts)
            counts.update(step.counts)
            self._progress[step.partition] = (epoch, Progress(watermark=step.to_watermark, counts=counts))
        if lost:
            raise Conflict(f"the watermark of partitions {lost} was moved by another writer or lost")

    def _progress_of(self, partition: int, epoch: str) -> Progress:
        written, progress = self._progress.get(partition, ("", Progress()))
        return progress if written == epoch else Progress()

    def _note_seen(self, update: UserUpdate) -> None:
        seen = self.seen.setdefault(update.user_id, {})
        for item_id in update.unseen:
            seen.pop(item_id, None)
        for item_id, event_time_ms in update.seen_times.items():
            seen[item_id] = max(event_time_ms, seen.get(item_id, 0))
        for item_id in sorted(seen, key=lambda item: (seen[item], item))[: max(0, len(seen) - self._max_seen)]:
            del seen[item_id]


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
