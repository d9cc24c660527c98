"""What the state cases share: a store that loses data as Redis does, and an encoder process on it.

Items are the letters a to f, so that a history reads as "abc". The oracle is a replay of the log into a store that
never lost anything; histories, seen items and query states are compared with it, not counts.
"""

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream
from fakes.stream import MemoryTopics
from gateway.gateway_scene import ITEMS
from prometheus_client import CollectorRegistry

from services.contracts import stored_history
from services.contracts.topics.histories import HISTORIES
from services.contracts.topics.interactions import Interaction, encode_interaction
from services.encoder.consumer import Consumer, ConsumerLimits
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.handlers.encode import states_of
from services.encoder.handlers.forget_users import ForgetUsers
from services.encoder.metrics import EncoderMetrics
from services.encoder.models import Model
from services.offline.backfill.memory_store import MemoryStore
from services.platform.errors import FreshetError
from services.platform.stream.ports import Leases
from services.user_state.forgetting import Forgotten, KnownForgets
from services.user_state.history_topic import HistoryTopic
from services.user_state.restore_users import LogReplay, RestoreUsers
from services.user_state.values import UserHistory
from services.user_state.write_histories import WriteHistories

NOW_MS = 1_800_000_000_000
ANN = "ann"
QUICK = ConsumerLimits(poll_ms=1, backoff_s=0.001, max_backoff_s=0.01, check_every_s=0.0, commit_every_s=0.0)


def vocabulary(model_version: str = "m1", shift: int = 0) -> Vocabulary:
    """A model that knows the six items; `shift` makes the states of another model differ."""
    return Vocabulary(
        model_version=model_version,
        item_index={item_id: shift + number for number, item_id in enumerate(ITEMS)},
        user_index={},
        max_history=16,
    )


def interaction(item: str, *, user: str = ANN, event_id: str = "", second: int = 0, **changes: Any) -> Interaction:
    """A click; `second` orders events within a history."""
    fields: dict[str, Any] = {
        "user_id": user,
        "item_id": item,
        "event_id": event_id,
        "event_time_ms": NOW_MS + 1000 * second,
        "type": "click",
        "value": 1.0,
    }
    return Interaction(**(fields | changes))


def append(stream: MemoryStream, event: Interaction, partition: int = 0) -> int:
    return stream.append(partition, event.user_id.encode(), encode_interaction(event), NOW_MS)


def append_all(stream: MemoryStream, items: str, *, first: int = 0, user: str = ANN, partition: int = 0) -> None:
    """One click per letter; the event id of number n is "n"."""
    for number, item in enumerate(items, start=first):
        append(stream, interaction(item, user=user, event_id=f"{user}-{number}", second=number), partition)


class FragileStore(MemoryStore):
    """A `MemoryStore` that can lose what Redis can lose.

    `evict` takes users' keys away as `volatile-ttl` does; `older_copy` and `fall_back_to` play a failover to a replica
    that lags: the epoch is the same. `newer_format`: a newer version wrote the histories in a format that this version
    cannot read, so that loading them raises what `state_layout` raises.
    """

    newer_format = False

    def evict(self, user_ids: Iterable[str]) -> None:
        for user_id in user_ids:
            self._removed += 1
            self._positions.pop(user_id, None)
            self._histories.pop(user_id, None)
            self.seen.pop(user_id, None)
            for key in [key for key in self.states if key[0] == user_id]:
                del self.states[key]

    def older_copy(self) -> "FragileStore":
        return copy.deepcopy(self)

    def fall_back_to(self, older: "FragileStore", *, users: bool = True, progress: bool = True) -> None:
        """Without `progress`, only the users' keys are the replica's: they lie on other nodes of a cluster."""
        older = older.older_copy()
        if users:
            self._positions, self._histories = older._positions, older._histories
            self.seen, self.states, self.state_positions = older.seen, older.states, older.state_positions
        if progress:
            self._progress, self._forgets, self._users = older._progress, older._forgets, older._users

    def load_users(self, user_ids: Collection[str], epoch: str) -> Mapping[str, UserHistory]:
        found = super().load_users(user_ids, epoch)
        if self.newer_format:
            for history in found.values():
                if history.events:
                    stored_history.unpack_events(b"\xff" + stored_history.pack_events(history.events)[1:])
        return found

    def history(self, user_id: str = ANN) -> str:
        """The items of the history, oldest first."""
        return "".join(event.item_id for event in super().load_users([user_id], self.epoch() or "")[user_id].events)

    def contents(self, user_ids: Sequence[str] = (ANN,)) -> dict[str, Any]:
        """What a reader sees of each user: history, seen items, and the bytes of each model's query state."""
        return {
            user_id: {
                "history": self.history(user_id),
                "seen": "".join(sorted(self.seen.get(user_id, {}))),
                "states": {
                    version: state.query_state.components
                    for (owner, version), state in self.states.items()
                    if owner == user_id
                },
            }
            for user_id in user_ids
        }


def another_reader(stream: Any) -> Any:
    """A reader of the same log with positions of its own."""
    if isinstance(stream, MemoryStream):
        return stream.reader()
    reader = copy.copy(stream)
    reader._next = {}
    if hasattr(stream, "assigned"):
        reader.assigned = dict(stream.assigned)
    return reader


class EncoderProcess:
    """The encoder process on memory ports. Another one on the same stream and store is a restart."""

    def __init__(
        self,
        stream: Any,
        store: Any,
        *,
        words: Vocabulary | None = None,
        model: HashEncoder | None = None,
        limits: ConsumerLimits = QUICK,
        forget_log: MemoryForgetLog | None = None,
        pseudonym_key: bytes = b"key",
        earlier_keys: Sequence[bytes] = (),
        keep_every_s: float = 0.0,
        outbox: Any = None,
        leases: Leases | None = None,
    ) -> None:
        words, self.model, forgotten = words or vocabulary(), model or HashEncoder(), Forgotten()
        histories = getattr(stream, "histories", None) or MemoryTopics({HISTORIES: 1})
        self.outbox = outbox or MemoryOutbox(histories, lambda: NOW_MS)
        self.store = store
        # A reader of the topics of its own, as every process has.
        log = another_reader(stream)
        self.keep = WriteHistories(
            topic=HistoryTopic(histories.reader(), self.outbox),
            log=log,
            store=store,
            every_s=keep_every_s,
            clock_ms=lambda: NOW_MS,
        )
        handler = ApplyRecords(
            store=store,
            outbox=self.outbox,
            encoder=self.model,
            vocabulary=words,
            pseudonym_key=pseudonym_key,
            forgotten=forgotten,
            restore_users=RestoreUsers(
                store=store,
                replay=LogReplay(
                    log=log,
                    letters=getattr(stream, "letters", None),
                    forgotten=forgotten,
                    max_history=words.max_history,
                    schema=words.schema,
                ),
                keep=self.keep,
                model_version=words.model_version,
                make_states=partial(states_of, Model(words, self.model), clock_ms=lambda: NOW_MS),
                clock_ms=lambda: NOW_MS,
            ),
            keep=self.keep,
            clock_ms=lambda: NOW_MS,
        )
        self.consumer = Consumer(
            stream=stream,
            handler=handler,
            forgets=ForgetUsers(
                known=KnownForgets(topic=(forget_log or MemoryForgetLog()).reader(), forgotten=forgotten),
                store=store,
                outbox=self.outbox,
                encoder=self.model,
                model_version=words.model_version,
                pseudonym_keys=(pseudonym_key, *earlier_keys),
                reader="test",
                keep=self.keep,
                check_in_step=handler.progress.check_in_step,
            ),
            metrics=EncoderMetrics(CollectorRegistry()),
            limits=limits,
            leases=leases,
        )

    def settle(self, turns: int = 50) -> "EncoderProcess":
        """Turn the loop until nothing comes any more; after an error of the tree it tries again, as the thread does.

        It gives up after `turns`: what is compared then shows that the process is stuck.
        """
        for _ in range(turns):
            try:
                if not self.consumer.step():
                    return self
            except FreshetError:
                continue
        return self

    def run(self, clock: "LoopClock") -> None:
        """The consumer's own loop, failures, waits and all, until the clock says that it is over."""
        self.consumer._stop = clock
        self.consumer._run()

    def set_aside(self) -> list[int]:
        """Offsets of the dead letters."""
        return [letter.record.offset for letter in self.outbox.dead_letters]


class LoopClock(threading.Event):
    """Time that passes only where the loop waits, so that what it does within two seconds depends on no machine.

    Over when `done()`, or after `limit_s`.
    """

    def __init__(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        super().__init__()
        self._done, self._limit_s = done, limit_s
        self.now_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return self.is_set()

    def is_set(self) -> bool:
        return self._done() or self.now_s >= self._limit_s


def replay(
    stream: Any,
    user_ids: Sequence[str] = (ANN,),
    words: Vocabulary | None = None,
    forget_log: MemoryForgetLog | None = None,
) -> dict[str, Any]:
    """The contents of a store that lost nothing, after the whole log."""
    calm = MemoryStream(len(stream.log))
    calm.log = stream.log
    store = FragileStore()
    EncoderProcess(calm, store, words=words, forget_log=forget_log).settle()
    return store.contents(user_ids)
