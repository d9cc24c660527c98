"""Merge a user's records of `interactions` again, with the same result as the first time."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.algorithms.bundles.event_schema import EventSchema
from services.contracts.topics.dead_letters import stored_letters
from services.platform.stream.ports import Reader
from services.platform.stream.reading import read_between
from services.platform.stream.records import furthest
from services.user_state.forgetting import Forgotten
from services.user_state.merging import MAX_RECORDS_PER_USER, Arrival, merge, read_arrival
from services.user_state.values import UserHistory


@dataclass(slots=True)
class ReplayedUser:
    """A user as far as the log was read: history, seen items, and records not merged yet."""

    history: UserHistory = field(default_factory=UserHistory)
    seen: dict[str, int] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class LogReplay:
    """log: a separate reader of `interactions`. letters: of its dead letters; a readable record among them is left out.
    max_history, schema: as in the stream's merges.
    """

    log: Reader
    forgotten: Forgotten
    max_history: int
    schema: EventSchema
    letters: Reader | None = None

    def __call__(self, users: Mapping[str, ReplayedUser], ranges: Mapping[int, tuple[int, int]]) -> None:
        """Add the records between each partition's first and last offset to these users."""
        if not users:
            return
        wanted = {user_id.encode() for user_id in users}
        aside = self._set_aside(wanted)
        for record in read_between(self.log, ranges):
            if record.key in wanted and aside.get((record.partition, record.offset)) != record.value:
                arrival = read_arrival(record)
                if isinstance(arrival, Arrival):
                    user_id = arrival.interaction.user_id
                    users[user_id].arrivals.append(arrival)
                    if len(users[user_id].arrivals) == MAX_RECORDS_PER_USER:
                        self._merge(users[user_id], user_id)
        for user_id, user in users.items():
            self._merge(user, user_id)

    def close(self) -> None:
        """Close the connections."""
        self.log.close()
        if self.letters is not None:
            self.letters.close()

    def _set_aside(self, keys: Collection[bytes]) -> Mapping[tuple[int, int], bytes]:
        """These keys' dead letters by position. Callers compare the value too, since another log may have a good record
        there.
        """
        if self.letters is None:
            return {}
        first, end = self.letters.bounds([0])[0]
        letters = stored_letters(r for r in read_between(self.letters, {0: (first, end - 1)}) if r.key in keys)
        return {(letter.position.partition, letter.position.offset): letter.value for letter in letters}

    def _merge(self, user: ReplayedUser, user_id: str) -> None:
        if not user.arrivals:
            return
        void = self.forgotten.up_to(user_id)
        merged = merge(user.history, user.arrivals, self.max_history, self.schema, void)
        user.history = UserHistory(
            events=merged.events,
            recent=merged.recent,
            positions=merged.positions,
            forgotten=furthest(user.history.forgotten, void),
        )
        for item_id in merged.unseen:
            user.seen.pop(item_id, None)
        for item_id, time_ms in merged.seen_times.items():
            user.seen[item_id] = max(time_ms, user.seen.get(item_id, 0))
        user.arrivals.clear()
