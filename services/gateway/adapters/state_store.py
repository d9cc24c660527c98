"""The state store, through `services.user_state.reader`."""

import time
from collections.abc import Mapping, Sequence

from services.gateway.domain import HistoryEvent
from services.gateway.metrics import PartCalls
from services.user_state.reader import StateReader
from services.user_state.values import UserView


class RedisUserStates:
    """Implements `ports.UserStates` for one model version. calls: counts the reads of users."""

    def __init__(self, reader: StateReader, model_version: str, calls: PartCalls | None = None) -> None:
        self._reader = reader
        self._model_version = model_version
        self._calls = calls or PartCalls()

    async def read_user(self, user_id: str, *, with_seen: bool, partition: int | None) -> UserView:
        """Read in one round trip. Other models' states are ignored."""
        began, failed = time.perf_counter(), True
        try:
            view = await self._reader.read_user(user_id, self._model_version, with_seen=with_seen, partition=partition)
            failed = False
        finally:
            self._calls.add(time.perf_counter() - began, failed=failed)
        return view

    async def read_history(self, user_id: str) -> Sequence[HistoryEvent]:
        events = await self._reader.read_events(user_id)
        return [HistoryEvent(event.item_id, event.event_time_ms, event.type, event.value) for event in events]

    async def epoch(self) -> str | None:
        return await self._reader.epoch()

    async def progress(self) -> tuple[str | None, Mapping[int, int]]:
        epoch, progress = await self._reader.read_progress()
        return epoch, {partition: found.watermark for partition, found in progress.items()}
