"""TailInteractions: a live sample of the topic `interactions`, for operators and support."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.interactions import Interaction, decode_interaction, validate
from services.gateway.ports import StreamEnds
from services.gateway.recommend.catalogue import Titles
from services.platform.errors import InvalidRequest
from services.platform.stream.records import SourceRecord
from services.user_state.values import now_ms

# A tail ends after `_LONGEST_S`; opening it again is authorized and audited again.
_EVERY_S, _TIMEOUT_S, _LONGEST_S = 1.0, 5.0, 300.0
# Each process has a new key, so that pseudonyms differ between processes and after a restart.
_KEY = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class TailedInteraction:
    """An interaction with its item's title ("": unknown). written_ms: as in `SourceRecord`."""

    interaction: Interaction
    title: str
    written_ms: int


@dataclass(frozen=True, slots=True)
class Tailed:
    """At most one interaction of each partition, oldest first.

    left_out: number of other records written since the previous sample, including those that the encoder rejects.
    """

    interactions: Sequence[TailedInteraction]
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TailInteractions:
    """The handler. It reads the newest record of each partition, so a busy stream costs no more than a calm one."""

    ends: StreamEnds
    titles: Titles

    async def __call__(self, *, shows_users: bool, stops: Callable[[], bool]) -> AsyncIterator[Tailed]:
        """Yield an empty sample at once, then one each second with new records, for five minutes or until `stops`.

        shows_users: user ids instead of pseudonyms. Raises: DependencyUnavailable or DeadlineExceeded if the
        log cannot be read.
        """
        until = time.monotonic() + _LONGEST_S
        before = await self.ends.interactions(_TIMEOUT_S)
        yield Tailed((), 0)
        while time.monotonic() < until and not stops():
            await asyncio.sleep(_EVERY_S)
            after = await self.ends.interactions(_TIMEOUT_S)
            moved = {partition: end - 1 for partition, end in after.items() if end > before.get(partition, end)}
            if moved:
                records = await self.ends.records(moved, _TIMEOUT_S)
                shown = self._shown(records.values(), shows_users=shows_users)
                num_written = sum(at + 1 - before[partition] for partition, at in moved.items())
                yield Tailed(shown, num_written - len(shown))
            before = after

    def _shown(self, records: Iterable[SourceRecord], *, shows_users: bool) -> list[TailedInteraction]:
        found: list[tuple[Interaction, int]] = []
        for record in sorted(records, key=lambda one: one.written_ms):
            with contextlib.suppress(InvalidRequest):
                one = decode_interaction(record.value, record.headers, record.key)
                validate(one, now_ms())
                user_id = one.user_id if shows_users else pseudonym_of(one.user_id, _KEY)
                found.append((replace(one, user_id=user_id), record.written_ms))
        titles = self.titles.of([one.item_id for one, _ in found])
        return [TailedInteraction(one, title, at_ms) for (one, at_ms), title in zip(found, titles, strict=True)]
