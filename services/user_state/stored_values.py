"""Convert between Redis' bytes and `values.py`; build scripts' arguments."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from services.contracts import stored_history
from services.contracts.query_state import PackedQueryState
from services.contracts.stored_history import PackedHistory
from services.user_state import layout
from services.user_state.layout import Home
from services.user_state.values import ForgetsApplied, PopularityStep, Progress, StoredState, UserHistory, UserUpdate

HISTORY_FIELDS = ("position", "events", "ids")
PROGRESS_FIELDS = ("epoch", "watermark", "unfinished", "anchors", *layout.COUNT_FIELDS)


def progress_of(values: Sequence[bytes | None], epoch: bytes | None) -> Progress:
    """The progress, empty if its epoch is not `epoch`. values: of PROGRESS_FIELDS."""
    if epoch is None or values[0] != epoch:
        return Progress()
    counts = {name: int(value or 0) for name, value in zip(layout.COUNT_FIELDS, values[4:], strict=True)}
    return Progress(
        watermark=int(values[1] or -1),
        unfinished=int(values[2] or 0),
        anchors=(values[3] or b"").decode(),
        counts=counts,
    )


def is_lost_user(
    epoch: str, home: Home, entry: bytes | None, position: bytes | None, *, events: bool, seen: bool
) -> bool:
    """Whether the user's keys are missing, are behind the table of users, or have events but no seen items.

    events, seen: whether the user has any.
    """
    applied = layout.unpack_entry(entry, time.time())
    if applied is None:
        return False
    found = layout.unpack_positions(epoch, position)
    return found is None or found[0].get(home.partition, -1) < applied or (events and not seen)


def history_of(
    epoch: str, home: Home, entry: bytes | None, row: Sequence[bytes | None], *, has_seen: bool
) -> UserHistory:
    """The history. entry: the user's in the table of users. row: the values of HISTORY_FIELDS."""
    position, events, ids = row
    is_lost = is_lost_user(epoch, home, entry, position, events=bool(events), seen=has_seen)
    found = layout.unpack_positions(epoch, position)
    known = -1 if entry is None else int(entry.partition(b":")[0])
    if found is None:
        return UserHistory(expected=position or b"", is_lost=is_lost, known=known)
    positions, forgotten = found
    return UserHistory(
        events=stored_history.unpack_events(events),
        recent=stored_history.unpack_recent(ids),
        positions=positions,
        forgotten=forgotten,
        expected=position or b"",
        is_lost=is_lost,
        known=known,
    )


def dumped_history(
    epoch: str, position: bytes | None, events: bytes | None, ids: bytes | None, seen: bytes | None
) -> PackedHistory | None:
    """A user from the script DUMP; None without data of this epoch."""
    found = layout.unpack_positions(epoch, position)
    if found is None:
        return None
    words = seen.decode().split("\0") if seen else []
    times = map(int, map(float, words[1::2]))
    return PackedHistory(
        *found,
        stored_history.event_columns(events),
        ids or b"",
        *stored_history.pack_seen(dict(zip(words[::2], times, strict=True))),
    )


def state_of(values: Sequence[bytes | None], model_version: str, trace: bytes | None = None) -> StoredState | None:
    """The state; None if a value is missing. values, trace: of STATE_FIELDS and STATE_TRACE."""
    if None in values:
        return None
    components, gate, *texts = cast(list[bytes], values)
    num_components, width, partition, offset, event_time_ms, applied_ms = map(int, texts)
    return StoredState(
        query_state=PackedQueryState(
            model_version=model_version,
            components=components,
            gate=gate,
            num_components=num_components,
            component_width=width,
        ),
        partition=partition,
        offset=offset,
        event_time_ms=event_time_ms,
        applied_ms=applied_ms,
        traceparent="" if trace is None else layout.traceparent_of(trace, partition, offset),
    )


def state_words(state: StoredState) -> list[Any]:
    """Fields and values of a state's hash in turn: the inverse of `state_of`."""
    packed = state.query_state
    values: tuple[Any, ...] = (packed.components, packed.gate, packed.num_components, packed.component_width)
    values += (state.partition, state.offset, state.event_time_ms, state.applied_ms)
    words = [word for pair in zip(layout.STATE_FIELDS, values, strict=True) for word in pair]
    if state.traceparent:
        words += (layout.STATE_TRACE, layout.trace_text(state.partition, state.offset, state.traceparent))
    return words


def apply_words(
    update: UserUpdate, epoch: str, watermarks: Mapping[int, int], *, ttl_seconds: int, max_seen: int
) -> tuple[list[str], list[Any]]:
    """Keys and arguments of the script APPLY, with which REWRITE's begin."""
    state, home = update.state, layout.home_of(update.user_id, epoch)
    keys = [
        layout.history_key(home),
        layout.seen_key(home),
        layout.state_key(home, update.model_version),
        layout.users_key(home.partition),
        layout.progress_key(home.partition),
    ]
    arguments: list[Any] = [
        update.expected,
        layout.pack_positions(epoch, update.positions, update.forgotten),
        ttl_seconds,
        stored_history.pack_events(update.events),
        stored_history.pack_recent(update.recent),
        max_seen,
        update.state_change,
        update.user_id,
        layout.pack_entry(update.positions.get(home.partition, -1), int(time.time()) + ttl_seconds),
        epoch,
        watermarks.get(home.partition, ""),
        "\0".join(update.turned_down),
        len(update.unseen),
        *update.unseen,
        len(update.seen_times),
    ]
    for item_id, event_time_ms in update.seen_times.items():
        arguments += (event_time_ms, item_id)
    if state is not None and update.state_change == "set":
        words = state_words(state)
        arguments += (len(words), *words)
    return keys, arguments


def forget_moves(
    forgets: ForgetsApplied | None, homes: Sequence[Home], epoch: str
) -> tuple[list[tuple[str, str, str]], dict[int, str]]:
    """REWRITE's last three arguments for each user, and the progress texts after the last.

    forgets: None for a writer that does not apply the topic; the arguments are then empty.
    """
    if forgets is None:
        return [("", "", "")] * len(homes), {}
    texts, moves = dict(forgets.texts), []
    for home in homes:
        before = texts[home.partition]
        offset, rewritten = layout.unpack_forgets(epoch, before)
        texts[home.partition] = layout.forgets_text(epoch, offset, rewritten + 1)
        moves.append((forgets.reader, before, texts[home.partition]))
    return moves, texts


def popularity_words(step: PopularityStep | None, ttl_seconds: int) -> list[Any]:
    """ADVANCE's last arguments; none if no popular item changes."""
    if step is None or not (step.joins or step.goes):
        return []
    joins, goes = ([word for pair in some.items() for word in pair] for some in (step.joins, step.goes))
    return [step.half_life_s, layout.MAX_POPULAR, ttl_seconds, len(joins), *joins, *goes]
