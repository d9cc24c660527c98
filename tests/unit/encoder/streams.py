"""What the encoder's tests share: a vocabulary, interactions as records, and a store, outbox and encoder that crash."""

from collections.abc import Callable, Sequence
from typing import Any

from fakes.encoder import HashEncoder, MemoryForgetLog, MemoryOutbox, MemoryStream

from services.contracts.topics.forgets import Forget
from services.contracts.topics.interactions import Interaction, encode_interaction
from services.encoder.domain import Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.handlers.forget_users import ForgetUsers
from services.offline.backfill.memory_store import MemoryStore
from services.platform.stream.ports import Offsets
from services.user_state.forgetting import Forgotten, KnownForgets

NOW_MS = 1_800_000_000_000
VOCABULARY = Vocabulary(
    model_version="model-1",
    item_index={f"item-{number}": number for number in range(50)},
    user_index={"user-0": 7},
    max_history=8,
)


def interaction(user: int = 0, item: int = 0, **changes: Any) -> Interaction:
    fields: dict[str, Any] = {
        "user_id": f"user-{user}",
        "item_id": f"item-{item}",
        "event_time_ms": NOW_MS,
        "type": "click",
        "value": 1.0,
    }
    return Interaction(**(fields | changes))


def append(stream: MemoryStream, event: Interaction, partition: int = 0) -> int:
    return stream.append(partition, event.user_id.encode(), encode_interaction(event), NOW_MS)


class Crash(Exception):
    """The process died here."""


class Crashing:
    """Wraps a port: `plan()` says, for each call, whether to die before it, after it, or not at all."""

    def __init__(self, inner: Any, plan: Callable[[str], str]) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in ("publish", "apply", "advance", "encode", "load_users", "forget", "note_forgets"):
            return attribute

        def call(*args: Any) -> Any:
            fate = self._plan(name)
            if fate == "before":
                raise Crash(name)
            if fate == "partly" and name == "apply" and len(args[0]) > 1:
                attribute(args[0][: len(args[0]) // 2], *args[1:])
                raise Crash(name)
            answer = attribute(*args)
            if fate != "no":
                raise Crash(name)
            return answer

        return call


def handler_on(
    store: MemoryStore,
    outbox: MemoryOutbox,
    vocabulary: Vocabulary = VOCABULARY,
    plan: Callable[[str], str] = lambda _: "no",
    forgotten: Forgotten | None = None,
) -> ApplyRecords:
    return ApplyRecords(
        store=Crashing(store, plan),
        outbox=Crashing(outbox, plan),
        encoder=Crashing(HashEncoder(), plan),
        vocabulary=vocabulary,
        pseudonym_key=b"key",
        forgotten=forgotten or Forgotten(),
        clock_ms=lambda: NOW_MS,
    )


def forget(user: int = 0, forget_id: str = "f1", **up_to: int) -> Forget:
    """up_to: p0=3 is offset 3 of partition 0."""
    places = {int(name[1:]): offset for name, offset in up_to.items()}
    return Forget(forget_id=forget_id, user_id=f"user-{user}", up_to=places, requested_ms=NOW_MS)


def forgets_on(
    log: MemoryForgetLog,
    store: MemoryStore,
    outbox: MemoryOutbox,
    forgotten: Forgotten,
    plan: Callable[[str], str] = lambda _: "no",
    encoder: HashEncoder | None = None,
    ends: Callable[[], Offsets] = dict,
    **given: Any,
) -> ForgetUsers:
    """A process's share of forgetting, reading the log from its beginning."""
    return ForgetUsers(
        known=KnownForgets(topic=log.reader(), forgotten=forgotten, ends=ends),
        store=Crashing(store, plan),
        outbox=Crashing(outbox, plan),
        encoder=encoder or HashEncoder(),
        model_version=VOCABULARY.model_version,
        pseudonym_keys=(b"key",),
        reader="test",
        **given,
    )


def drain(handler: ApplyRecords, stream: MemoryStream, batch_sizes: Sequence[int] = (1_000,)) -> None:
    """Apply everything in batches of the given sizes, over and over, committing after each."""
    handler.resync(stream)
    turn = 0
    while records := stream.poll(0, batch_sizes[turn % len(batch_sizes)]):
        handler.apply(records)
        stream.commit(handler.progress.committable())
        turn += 1
