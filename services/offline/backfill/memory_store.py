"""An in-memory state store that behaves like the Redis one, for jobs that encode whole logs and for tests."""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from services.algorithms.items import popularity
from services.contracts import stored_history
from services.platform.errors import Conflict
from services.user_state import layout as state_layout
from services.user_state.values import (
    AdvanceStep,
    Dump,
    ForgetsApplied,
    ModelState,
    Popularity,
    PopularityStep,
    Progress,
    StoredState,
    StoreUsage,
    UserHistory,
    UserKeys,
    UserUpdate,
)


class MemoryStore:
    """A state store whose writes check the same conditions as Redis's Lua scripts."""

    def __init__(self, max_seen: int = 2_000) -> None:
        self._max_seen = max_seen
        self._epoch: str | None = None
        self._paused_until = 0.0
        self._positions: dict[str, tuple[str, dict[int, int], dict[int, int]]] = {}
        self._histories: dict[str, UserHistory] = {}
        self._progress: dict[int, tuple[str, Progress]] = {}
        # By user: the epoch, and the last applied offset of the user's partition.
        self._users: dict[str, tuple[str, int]] = {}
        self._removed = 0
        # Packed offset of the last applied forget, by reader and partition.
        self._forgets: dict[tuple[str, int], str] = {}
        self._popular: dict[int, tuple[str, float, dict[str, float]]] = {}
        self.seen: dict[str, dict[str, int]] = {}
        self.turned_down: dict[str, Sequence[str]] = {}
        self.states: dict[tuple[str, str], StoredState] = {}
        # Each state's position: how much of the history it reflects.
        self.state_positions: dict[tuple[str, str], bytes] = {}

    def wipe(self) -> None:
        """Lose everything, like a restarted Redis without persistence."""
        self.__init__(self._max_seen)  # type: ignore[misc]

    def epoch(self) -> str | None:
        return self._epoch

    def ensure_epoch(self, num_partitions: int) -> tuple[str, bool]:
        made = self._epoch is None
        if self._epoch is None:
            self._epoch = state_layout.new_epoch(num_partitions)
        state_layout.check_epoch(self._epoch, num_partitions)
        return self._epoch, made

    def start_new_epoch(self, epoch: str) -> None:
        if self._epoch == epoch:
            self.wipe()
            self.ensure_epoch(state_layout.num_partitions_of(epoch))

    def add_model(self, model_version: str) -> None:
        """Do nothing: every state is stored with its model's version."""

    def pause_consumer(self, seconds: int) -> None:
        self._paused_until = time.monotonic() + seconds

    def release(self) -> None:
        self._paused_until = 0.0

    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def progress(self, partitions: Collection[int], epoch: str) -> Mapping[int, Progress]:
        return {partition: self._progress_of(partition, epoch) for partition in partitions}

    def begin(self, partitions: Sequence[int], epoch: str) -> Mapping[int, Progress]:
        if epoch != self._epoch:
            raise Conflict(f"the state store's epoch is not {epoch} any more")
        self._progress.update({p: (epoch, self._progress_of(p, epoch)) for p in partitions})
        self._popular = {p: found for p, found in self._popular.items() if p not in partitions or found[0] == epoch}
        return self.progress(partitions, epoch)

    def load_users(self, user_ids: Collection[str], epoch: str) -> Mapping[str, UserHistory]:
        found: dict[str, UserHistory] = {}
        for user_id in user_ids:
            current, expected = self._positions.get(user_id), self._expected(user_id)
            is_lost = self._is_lost(user_id, epoch)
            known = self._users.get(user_id, ("", -1))[1]
            if current and current[0] == epoch:
                stored = self._histories[user_id]
                found[user_id] = UserHistory(
                    events=list(stored.events),
                    recent=list(stored.recent),
                    positions=dict(current[1]),
                    forgotten=dict(current[2]),
                    expected=expected,
                    is_lost=is_lost,
                    known=known,
                )
            else:
                found[user_id] = UserHistory(expected=expected, is_lost=is_lost, known=known)
        return found

    def find_lost(self, partitions: Collection[int], epoch: str) -> Iterator[Collection[str]]:
        yield [
            user_id
            for user_id in self._users
            if state_layout.home_of(user_id, epoch).partition in partitions and self._is_lost(user_id, epoch)
        ]

    def usage(self) -> StoreUsage:
        return StoreUsage(self._removed, 0.0)

    def _is_lost(self, user_id: str, epoch: str) -> bool:
        entry = self._users.get(user_id)
        if entry is None or entry[0] != epoch:
            return False
        written, positions, _ = self._positions.get(user_id, ("", {}, {}))
        has_events = user_id in self._histories and bool(self._histories[user_id].events)
        home = state_layout.home_of(user_id, epoch).partition
        return written != epoch or positions.get(home, -1) < entry[1] or (has_events and not self.seen.get(user_id))

    def apply(
        self,
        updates: Sequence[UserUpdate],
        epoch: str,
        watermarks: Mapping[int, int],
        beside: Sequence[ModelState] = (),
    ) -> None:
        lost = 0
        for update in updates:
            home = state_layout.home_of(update.user_id, epoch).partition
            progress = self._progress_of(home, epoch)
            if self._expected(update.user_id) != update.expected or (
                home in watermarks
                and (self._progress.get(home, ("",))[0], progress.watermark) != (epoch, watermarks[home])
            ):
                lost += 1
                continue
            if home in watermarks:
                self._progress[home] = (epoch, replace(progress, unfinished=progress.unfinished + 1))
            self._users[update.user_id] = (epoch, update.positions.get(home, -1))
            self._positions[update.user_id] = (epoch, dict(update.positions), dict(update.forgotten))
            self._histories[update.user_id] = UserHistory(events=list(update.events), recent=list(update.recent))
            self._note_seen(update)
            self.turned_down[update.user_id] = update.turned_down
            self._change_state(
                update.user_id, update.model_version, update.state, update.state_change, before=update.expected
            )
        self.store_states(beside, epoch)
        if lost:
            raise Conflict(f"{lost} of {len(updates)} users were changed by another writer, or the store lost progress")

    def store_states(self, states: Sequence[ModelState], epoch: str) -> int:
        written = 0
        for one in states:
            if self._positions.get(one.user_id) != (epoch, dict(one.positions), dict(one.forgotten)):
                continue
            written += 1
            self._change_state(one.user_id, one.model_version, one.state, one.change, before=one.before)
        return written

    def _expected(self, user_id: str) -> bytes:
        current = self._positions.get(user_id)
        return state_layout.pack_positions(*current) if current else b""

    def _change_state(
        self, user_id: str, version: str, state: StoredState | None, change: str, *, before: bytes
    ) -> None:
        key = (user_id, version)
        if change == "set" and state is not None:
            self.states[key], self.state_positions[key] = state, self._expected(user_id)
        elif change == "drop":
            self.states.pop(key, None)
            self.state_positions.pop(key, None)
        elif self.state_positions.get(key) == before:
            self.state_positions[key] = self._expected(user_id)

    def rewrite(self, updates: Sequence[UserUpdate], epoch: str, forgets: ForgetsApplied | None = None) -> None:
        lost = 0
        for update in updates:
            if self._expected(update.user_id) != update.expected:
                lost += 1
                continue
            self._positions.pop(update.user_id, None)
            self._histories.pop(update.user_id, None)
            self.seen.pop(update.user_id, None)
            self.turned_down.pop(update.user_id, None)
            for key in [key for key in self.states if key[0] == update.user_id]:
                del self.states[key]
                self.state_positions.pop(key, None)
            if update.expected or update.positions:
                self.apply([replace(update, expected=b"")], epoch, {})
        if lost:
            raise Conflict(f"{lost} of {len(updates)} users were changed by another writer")

    def dump(self, user_ids: Collection[str], partitions: Collection[int], epoch: str) -> Dump:
        found = self.load_users(user_ids, epoch)
        return Dump(
            histories={
                user_id: stored_history.pack_history(
                    history.positions, history.forgotten, history.events, history.recent, self.seen.get(user_id, {})
                )
                for user_id, history in found.items()
                if history.positions and not history.is_lost
            },
            lost=[user_id for user_id, history in found.items() if history.is_lost],
            progress=self.progress(partitions, epoch),
        )

    def user_ids(self, partition: int, epoch: str) -> Sequence[str]:
        return [
            user_id
            for user_id, (written, _) in self._users.items()
            if written == epoch and state_layout.home_of(user_id, epoch).partition == partition
        ]

    def seed(self, partition: int, user_ids: Collection[str], epoch: str) -> None:
        if self._progress.get(partition, ("",))[0] != epoch:
            raise Conflict(f"the progress of partition {partition} is of another epoch")
        for user_id in user_ids:
            if self._users.get(user_id, ("", 0))[0] != epoch:
                self._users[user_id] = (epoch, -1)

    def forgets_applied(self, reader: str, epoch: str) -> ForgetsApplied:
        texts = {p: self._forgets.get((reader, p), "") for p in range(state_layout.num_partitions_of(epoch))}
        offsets = {partition: state_layout.unpack_forgets(epoch, text)[0] for partition, text in texts.items()}
        return ForgetsApplied(reader, offsets, texts)

    def note_forgets(self, forgets: ForgetsApplied, offset: int, epoch: str) -> None:
        if any(self._forgets.get((forgets.reader, p), "") != text for p, text in forgets.texts.items()):
            raise Conflict("forgets were applied by another writer")
        after = state_layout.forgets_text(epoch, offset)
        self._forgets |= {(forgets.reader, partition): after for partition in forgets.texts}
        forgets.offsets = dict.fromkeys(forgets.texts, offset)
        forgets.texts = dict.fromkeys(forgets.texts, after)

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
            written = self._progress.get(step.partition, ("",))[0]
            if (written, current.watermark) != (epoch, step.from_watermark) or step.unfinished not in (
                None,
                current.unfinished,
            ):
                lost.append(step.partition)
                continue
            counts = Counter(current.counts)
            counts.update(step.counts)
            anchors = step.anchors or current.anchors
            self._progress[step.partition] = (
                epoch,
                Progress(watermark=step.to_watermark, counts=counts, anchors=anchors),
            )
            if step.popular is not None:
                self._note_popular(step.partition, epoch, step.popular)
        if lost:
            raise Conflict(f"the watermark of partitions {lost} was moved by another writer or lost")

    async def read_popular(self) -> list[Popularity]:
        rows = (self._popular[partition] for partition in sorted(self._popular))
        return [
            Popularity(half_life_s=half_life_s, levels=dict(sorted(levels.items(), key=lambda one: -one[1])))
            for epoch, half_life_s, levels in rows
            if epoch == self._epoch and levels
        ]

    def _note_popular(self, partition: int, epoch: str, step: PopularityStep) -> None:
        _, half_life_s, levels = self._popular.get(partition, (epoch, step.half_life_s, {}))
        if half_life_s != step.half_life_s and (step.joins or step.goes):
            levels = {}
        for item_id, level in step.joins.items():
            levels[item_id] = popularity.joined(levels[item_id], level) if item_id in levels else level
        for item_id, level in step.goes.items():
            left = popularity.without(levels.pop(item_id), level) if item_id in levels else None
            if left is not None:
                levels[item_id] = left
        surplus = max(0, len(levels) - state_layout.MAX_POPULAR)
        for item_id in sorted(levels, key=lambda one: (levels[one], one))[:surplus]:
            del levels[item_id]
        self._popular[partition] = (epoch, step.half_life_s, levels)

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
