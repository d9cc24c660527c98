"""What must be true, told from the logs alone: plain loops over records, nothing of the handlers.

`History` is a user after a run of records; `explanations` are all (state, seen items) that an answer may rest on;
`wrong_contents` compares everything that is kept with the logs once things have settled.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from freshet.v1 import events_pb2
from google.protobuf.message import DecodeError
from world import BUNDLE, KEY, MODELS, RULES, SETTLERS, USERS, World, components_of

from services.algorithms.scoring.states import QueryStates
from services.contracts.pseudonyms import pseudonym_of
from services.contracts.stored_history import hash_event_id
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.forgets import FORGETS
from services.contracts.topics.interactions import INTERACTIONS
from services.contracts.topics.items import ITEMS

Place = tuple[int, int]


class Event(NamedTuple):
    """One record of `interactions` that can be read."""

    place: Place
    user: str
    item: str
    id: str
    time_ms: int
    undoes: str
    said: tuple[str, float, str]  # type, value, exposure id

    @property
    def is_poison(self) -> bool:
        return not self.undoes and self.item in BUNDLE and self.time_ms // 1000 % 100 == 66


def _ms(stamp: Any) -> int:
    return stamp.seconds * 1000 + stamp.nanos // 1_000_000


@lru_cache(maxsize=4096)
def _read(key: bytes | None, value: bytes | None) -> tuple[Any, ...] | None:
    """An `Event` but its place; None: it cannot be read."""
    try:
        one = events_pb2.Interaction.FromString(value or b"")
    except DecodeError:
        return None
    if not one.user_id or key != one.user_id.encode():
        return None
    said = (one.type or "interaction", one.value, one.exposure_id)
    return one.user_id, one.item_id, one.event_id, _ms(one.event_time), one.undoes_event_id, said


def read_log(world: World) -> dict[Place, Event | None]:
    """Every record in order within its partition; None: it cannot be read."""
    return {
        (number, record.offset): None
        if (one := _read(record.key, record.value)) is None
        else Event((number, record.offset), *one)
        for number, log in enumerate(world.topics.logs[INTERACTIONS])
        for record in log
    }


def set_aside(world: World) -> set[Place]:
    """The records of `interactions` that lie in the dead letters, and still in the log."""
    found = set()
    for letter in world.dead_letters:
        headers = dict(letter.headers)
        if headers.get("freshet-source-topic") == INTERACTIONS.encode():
            place = int(headers["freshet-source-partition"]), int(headers["freshet-source-offset"])
            log = world.topics.logs[INTERACTIONS][place[0]]
            if place[1] < len(log) and log[place[1]].value == letter.value:
                found.add(place)
    return found


def forgets_of(world: World, user: str) -> list[tuple[int, Mapping[int, int]]]:
    """(offset in `forgets`, what is void) of a user, in order; each one covers what the ones before did."""
    found: list[tuple[int, Mapping[int, int]]] = []
    begin = world.topics._first.get((FORGETS, 0), 0)
    for record in world.topics.logs[FORGETS][0][begin:]:
        if record.key == user.encode():
            message = events_pb2.Forget.FromString(record.value)
            up_to = {one.partition: one.offset for one in message.up_to}
            if found:
                up_to = {p: max(up_to.get(p, -1), found[-1][1].get(p, -1)) for p in {*up_to, *found[-1][1]}}
            found.append((record.offset, up_to))
    return found


@dataclass
class History:
    """A user after these events. attributed: of each event that something preceded, what did: (item, seconds)."""

    events: list[tuple[int, int, int, str, str, tuple[str, float, str]]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    attributed: dict[Place, tuple[str, list[tuple[str, int]]]] = field(default_factory=dict)

    def pairs(self) -> list[tuple[str, int]]:
        """What the encoder reads: not what was turned down."""
        return [(item, time_ms // 1000) for time_ms, _, _, _, item, said in self.events if said[0] != "dislike"]


def replay(events: Iterable[Event], void: Mapping[int, int], longest: int) -> History:
    """Once each, in the order of the log; ordered by their times; late ones are only seen; what is void is nothing.

    What was shown is nothing either; what nobody named is attributed and changes nothing.
    """
    history, ids, counted, late = History(), set[str](), dict[str, Event](), set[str]()
    for event in events:
        partition, offset = event.place
        is_new = event.id not in ids
        ids.add(event.id)
        if offset <= void.get(partition, -1) or not is_new:
            continue
        if event.undoes:
            undone = counted.pop(event.undoes, None)
            if undone is not None:
                history.events = [one for one in history.events if one[1:3] != undone.place]
                history.attributed.pop(undone.place, None)
            continue
        kind = event.said[0]
        if kind == "impression":
            continue
        row = (event.time_ms, partition, offset, event.id, event.item, event.said)
        at = bisect_right(history.events, row[:3], key=lambda one: one[:3])
        if at == 0 and len(history.events) >= longest - longest // 4:
            if kind != "glimpse":
                late.add(event.item)
            continue
        history.attributed[event.place] = (event.item, History(history.events[:at]).pairs())
        counted[event.id] = event
        if kind == "glimpse":
            continue
        history.events.insert(at, row)
        if len(history.events) >= longest:
            del history.events[: ((len(history.events) - longest) // (longest // 4) + 1) * (longest // 4)]
    history.seen = {event.item for event in counted.values() if event.said[0] != "glimpse"} | late
    return history


class Oracle:
    """Looks at a world. Logs that were lost stay known: until the loss is noticed an answer may rest on them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._past: list[dict[Place, Event | None]] = []
        # Up to where partitions were applied when the bug was mended that poison trips: what is read again behind it
        # counts, though it was set aside before.
        self.mended_from: Mapping[int, int] | None = None

    def lost_log(self) -> None:
        """Said before the log of interactions loses records."""
        self._past.append(read_log(self.world))

    def of(self, user: str, log: Mapping[Place, Event | None] | None = None) -> list[Event]:
        """What counts of the log, of one user."""
        aside = set_aside(self.world)
        if (mended := self.mended_from) is not None:
            aside = {place for place in aside if place[1] <= mended[place[0]]}
        log = read_log(self.world) if log is None else log
        return [one for place, one in log.items() if one is not None and one.user == user and place not in aside]

    def final(self, user: str) -> History:
        """The user after everything."""
        forgets = forgets_of(self.world, user)
        return replay(self.of(user), forgets[-1][1] if forgets else {}, self.world.max_history)

    def explanations(self, user: str, model: str, floor: int, forgotten: int) -> list[tuple[bytes | None, set[str]]]:
        """All states and seen items that the user may have once records below `floor` of the home partition and the
        forgets up to offset `forgotten` count."""
        voids: list[Mapping[int, int]] = [void for at, void in forgets_of(self.world, user) if at > forgotten]
        before = [void for at, void in forgets_of(self.world, user) if at <= forgotten]
        found = []
        for log in (*self._past, read_log(self.world)):
            events = self.of(user, log)
            least = sum(event.place[1] < floor for event in events)
            for count in range(least, len(events) + 1):
                for void in (before[-1] if before else {}, *voids):
                    history = replay(events[:count], void, self.world.max_history)
                    state = components_of(model, user, history.pairs())
                    found.append((state[0] if state else None, history.seen))
        return found

    # Once things have settled.

    def wrong_contents(self, *, log_was_lost: bool) -> list[str]:
        """What is not as the logs have it."""
        found = [*self._wrong_users(), *self._wrong_letters()]
        # Where a log lost records, two interactions may have had one position.
        return found if log_was_lost else [*found, *self._wrong_sums(), *self._wrong_attributions()]

    def _wrong_letters(self) -> list[str]:
        log = read_log(self.world)
        good = sorted(p for p in set_aside(self.world) if p in log and log[p] is not None and not log[p].is_poison)
        return [f"good records among the dead letters: {good}"] if good else []

    def _wrong_users(self) -> list[str]:
        encoder = self.world.encoders["encoder"].process
        store, epoch = encoder.store, encoder.store.epoch() or ""
        found = []
        for user in (*USERS, *SETTLERS):
            wanted = self.final(user)
            stored = store.load_users([user], epoch)[user]
            events = [(time, p, o, hash_event_id(name), item, *said) for time, p, o, name, item, said in wanted.events]
            if [tuple(one) for one in stored.events] != events:
                found.append(
                    f"history of {user}: {[one[4] for one in stored.events]}, not {[one[4] for one in events]}"
                )
            seen = {item.decode() for item in self._zset(f"seen:{user}")}
            if seen != wanted.seen:
                found.append(f"seen of {user}: {sorted(seen)}, not {sorted(wanted.seen)}")
        return found

    def _zset(self, name: str) -> Iterable[bytes]:
        return next((value for key, value in self.world.redis.data.items() if key.endswith(f"}}:{name}".encode())), ())

    def _wrong_attributions(self) -> list[str]:
        """Every event that counts, and that something preceded, is attributed once in effect, to that."""
        rows = self._attributions()
        by_user: dict[str, dict[Place, set[tuple[str, str, bytes]]]] = {}
        for row in rows:
            by_user.setdefault(row.user, {}).setdefault(row.source, set()).add((row.item, row.model, row.state))
        found = []
        for user in (*USERS, *SETTLERS):
            mine, forgets, history = (
                by_user.get(pseudonym_of(user, KEY), {}),
                forgets_of(self.world, user),
                self.final(user),
            )
            if self.mended_from is not None and any(event.is_poison for event in self.of(user)):
                continue  # what it rests on depends on when it was attributed first
            if forgets:
                void = forgets[-1][1]
                left = [place for place in mine if place[1] <= void.get(place[0], -1)]
                if left:
                    found.append(f"attributions of {user} that a forget voids: {left}")
                continue
            wanted = {place: about for place, about in history.attributed.items() if components_of("m", user, about[1])}
            if mine.keys() != wanted.keys():
                found.append(f"attributions of {user}: {sorted(mine)}, not {sorted(wanted)}")
            for place in mine.keys() & wanted.keys():
                item, pairs = wanted[place]
                states = {(item, model, (components_of(model, user, pairs) or (b"", b""))[0]) for model in MODELS}
                if not mine[place] <= states:
                    found.append(f"attribution {place} of {user} rests on something else than what preceded it")
        return found

    def _attributions(self) -> list["Attributed"]:
        """What survives on the topic `attributions`, the first record of each interaction and model."""
        found: dict[tuple[int, str, Place, str], Attributed] = {}
        undone: set[tuple[str, Place]] = set()
        voids: list[tuple[str, dict[int, int]]] = []
        for number, log in enumerate(self.world.topics.logs[ATTRIBUTIONS]):
            for record in log:
                one = events_pb2.Attribution.FromString(record.value)
                if one.HasField("forgets"):
                    voids.append((one.user_pseudonym, {p.partition: p.offset for p in one.forgets.up_to}))
                elif one.HasField("undoes"):
                    undone.add((one.user_pseudonym, (one.undoes.partition, one.undoes.offset)))
                else:
                    source = (one.source.partition, one.source.offset)
                    row = Attributed(
                        number, source, one.user_pseudonym, one.item_id, one.query_state.model_version,
                        one.query_state.components, one.query_state.gate, one.type, one.value,
                    )  # fmt: skip
                    found.setdefault((number, one.user_pseudonym, source, row.model), row)
        return [
            row
            for row in found.values()
            if (row.user, row.source) not in undone
            and not any(user == row.user and row.source[1] <= void.get(row.source[0], -1) for user, void in voids)
        ]

    def _wrong_sums(self) -> list[str]:
        """The refreshers hold, and candidates serve, what the surviving attributions of their model add up to."""
        rows = [row for row in self._attributions() if row.model == MODELS[0]]
        listed, withdrawn = self._listed()
        weight = RULES.feedback.weight
        rows = [row for row in rows if weight(row.kind, row.value)]
        sums: dict[str, Any] = {}
        counts: dict[str, int] = {}
        known = [row for row in rows if row.item in BUNDLE or row.item in listed]
        if known:
            queries = QueryStates(
                components=np.array([np.frombuffer(r.state, "<f2").reshape(3, 4) for r in known], np.float32),
                gate=np.array([np.frombuffer(r.gate, "<f2") for r in known], np.float32),
            )
            weights = np.array([weight(row.kind, row.value) for row in known])
            for row, part in zip(
                known,
                RULES.items.contributions(queries, weights, RULES.items.rows([r.item for r in known])),
                strict=True,
            ):
                sums[row.item] = sums.get(row.item, 0) + part
                counts[row.item] = counts.get(row.item, 0) + 1
        remembered: set[str] = set()
        for number in range(len(self.world.topics.logs[ATTRIBUTIONS])):
            names = [f"{row.source[0]}-{row.source[1]}" for row in rows if row.partition == number]
            names.sort(key=lambda name: blake2b(name.encode(), digest_size=8).digest())
            remembered |= {*names[: RULES.max_remembered]}
        states = [state for running in self.world.refreshers.values() for state in running.held.partitions.values()]
        held = {item: state.sums.of([item]).sums[0] for state in states for item in state.sums}
        found = []
        if held.keys() != sums.keys():
            found.append(f"items with sums: {sorted(held)}, not {sorted(sums)}")
        found += [
            f"the sums of {item}" for item in held.keys() & sums if not np.array_equal(held[item], sums[item] / 2**30)
        ]
        visible = {entry for state in states for entry in state.remembered.visible}
        if visible != remembered:
            found.append(f"remembered: {sorted(visible)}, not {sorted(remembered)}")
        for replica in self.world.candidates:
            served = {item: one.num_interactions for item, one in replica.index.deltas.items() if not one.dropped}
            wanted = {item: counts[item] for item in counts if item not in withdrawn and sums[item].any()}
            if served != wanted:
                found.append(f"refreshed items served: {served}, not {wanted}")
            votes = {entry for entry, one in replica.index.memory.items() if not one.dropped}
            if votes != remembered:
                found.append(f"memory served: {sorted(votes)}, not {sorted(remembered)}")
        return found

    def _listed(self) -> tuple[set[str], set[str]]:
        newest = {}
        for record in self.world.topics.logs[ITEMS][0]:
            message = events_pb2.Item.FromString(record.value)
            newest[message.item_id] = message.withdrawn
        return {*newest}, {item for item, withdrawn in newest.items() if withdrawn}


class Attributed(NamedTuple):
    """One surviving attribution, and the partition it lies in."""

    partition: int
    source: Place
    user: str
    item: str
    model: str
    state: bytes
    gate: bytes
    kind: str
    value: float


def hidden_items(world: World, below: int) -> set[str]:
    """Items that the first records of `items` say are not to be answered."""
    newest: dict[str, bool] = {}
    for record in world.topics.logs[ITEMS][0][:below]:
        one = events_pb2.Item.FromString(record.value)
        newest[one.item_id] = one.withdrawn or (one.HasField("available") and not one.available)
    return {item for item, is_hidden in newest.items() if is_hidden}


def changed_items(world: World, from_offset: int) -> set[str]:
    """Items that later records speak of."""
    return {record.key.decode() for record in world.topics.logs[ITEMS][0][from_offset:] if record.key}


def seen_by_all(explained: Sequence[tuple[bytes | None, set[str]]]) -> set[str]:
    """What was seen whichever explanation is the right one."""
    return set.intersection(*(seen for _, seen in explained)) if explained else set()
