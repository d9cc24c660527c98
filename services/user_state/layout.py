"""Redis keys and packed values of user states, histories and stream progress (decision 031).

A user's home is the partition that Kafka's partitioner gives to the user id. All keys of a home partition share one
hash slot.

A user's position is the text `epoch|partition:offset,...|partition:offset,...`; the second list has the forgotten
offsets. A position of an earlier epoch reads as absent. Every write compares the whole text, so a write prepared before
a user is forgotten cannot restore the user's data.

The table of users has each user's last applied offset of the home partition, and the keys' expiry. A user in the
table is lost, not new, if the keys are missing or have a lower offset than the table.
"""

import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from services.platform.errors import PreconditionFailed
from services.platform.stream.kafka import partition_for
from services.platform.stream.records import covers

# `random-N`, set when the store is first filled. N is the number of partitions.
EPOCH_KEY = "stream:epoch"
# Exists while an import fills the store and the consumer waits.
PAUSE_KEY = "stream:hold"
# Model versions, each added before its first state.
MODELS_KEY = "stream:models"
# The pattern of all keys of partitions.
USER_KEYS = "{p[0-9]*}:*"
COUNT_FIELDS = ("applied", "duplicates", "dead_lettered", "unknown_items", "undone", "late", "forgotten", "kept_out")
STATE_FIELDS = (
    "components",
    "gate",
    "num_components",
    "component_width",
    "partition",
    "offset",
    "event_time_ms",
    "applied_ms",
)
# Popular items per partition. An item that drops out loses its level and restarts with its next event, which outweighs
# the old ones.
MAX_POPULAR = 2_000
# The `position` of the history that the state reflects. A duplicate record advances it too, unless a process with
# another model applies the record.
STATE_POSITION = "history_position"
# `partition:offset traceparent` of the traced event that made a state. A later write without a trace does not replace
# it, so its position then differs from the state's.
STATE_TRACE = "trace"


class Home(NamedTuple):
    """A user id and the partition of its keys."""

    partition: int
    user_id: str


# A batch needs each user's home three times; murmur2 in Python takes 2 us.
@lru_cache(maxsize=8_192)
def home_of(user_id: str, epoch: str) -> Home:
    return Home(partition_for(user_id.encode(), num_partitions_of(epoch)), user_id)


def num_partitions_of(epoch: str) -> int:
    """Return the epoch's number of partitions. Raises: PreconditionFailed if another version wrote the epoch."""
    _, dash, number = epoch.rpartition("-")
    if not dash or not number.isdecimal():
        raise PreconditionFailed(
            f"{EPOCH_KEY}={epoch!r:.80} in the state store; allowed: <random>-<partitions>, as this version writes it. "
            "Empty the state store: it is filled again from the topic"
        )
    return int(number)


def new_epoch(num_partitions: int) -> str:
    return f"{secrets.token_hex(8)}-{num_partitions}"


def check_epoch(epoch: str, num_partitions: int) -> None:
    """Raise PreconditionFailed if the store has another layout or number of partitions."""
    stored = num_partitions_of(epoch)
    if stored != num_partitions:
        raise PreconditionFailed(
            f"the state store was filled from {stored} partitions of `interactions`, which has {num_partitions} now: "
            "users have other home partitions. Run `freshet repartition`, or empty the state store: it is filled again "
            "from the topic"
        )


def history_key(home: Home) -> str:
    return f"{{p{home.partition}}}:history:{home.user_id}"


def seen_key(home: Home) -> str:
    return f"{{p{home.partition}}}:seen:{home.user_id}"


def state_key(home: Home, model_version: str) -> str:
    return f"{{p{home.partition}}}:state:{model_version}:{home.user_id}"


# Kinds of a gateway's short-lived lists (`sessions.py`).
PAGES, ANSWERS, IMPRESSIONS = "pages", "answers", "impressions"
SESSION_KINDS = (PAGES, ANSWERS, IMPRESSIONS)


def session_key(home: Home, kind: str) -> str:
    return f"{{p{home.partition}}}:{kind}:{home.user_id}"


def session_sizes_key(partition: int) -> str:
    """Return the key of a hash: expiry -> total bytes of the partition's session lists with that expiry."""
    return f"{{p{partition}}}:session_sizes"


def users_key(partition: int) -> str:
    return f"{{p{partition}}}:users"


def progress_key(partition: int) -> str:
    return f"{{p{partition}}}:progress"


def popular_key(partition: int) -> str:
    """Return the key of a partition's popular items by level (`algorithms.items.popularity`), some 100 bytes each."""
    return f"{{p{partition}}}:popular"


def forgets_key(partition: int) -> str:
    """Return the key of a hash with the `forgets_text` of each reader."""
    return f"{{p{partition}}}:forgets"


def forgets_text(epoch: str, offset: int, rewritten: int = 0) -> str:
    """Pack the offset up to which `forgets` is applied to a partition, and the number of users rewritten since."""
    return f"{epoch}|{offset}|{rewritten}" if rewritten else f"{epoch}|{offset}"


def unpack_forgets(epoch: str, text: str) -> tuple[int, int]:
    """The inverse of `forgets_text`; (-1, 0) without a value of this epoch."""
    written, *numbers = text.split("|")
    offset, rewritten = (*map(int, numbers), 0)[:2] if written == epoch and numbers else (-1, 0)
    return offset, rewritten


# The field with the table's epoch. No user id is empty.
TABLE_EPOCH = ""


def pack_entry(offset: int, expires_s: int) -> str:
    """Pack an entry of the table of users. offset: last applied offset of the home partition, or -1."""
    return f"{offset}:{expires_s}"


def unpack_entry(entry: bytes | None, now_s: float) -> int | None:
    """Return an entry's offset; None without an entry or after its expiry."""
    if not entry:
        return None
    offset, expires_s = entry.split(b":")
    return int(offset) if now_s < int(expires_s) else None


def _pack_offsets(offsets: Mapping[int, int]) -> str:
    return ",".join([f"{partition}:{offsets[partition]}" for partition in sorted(offsets)])


def _unpack_offsets(text: str) -> dict[int, int]:
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    return {int(partition): int(offset) for partition, offset in pairs}


def pack_positions(epoch: str, positions: Mapping[int, int], forgotten: Mapping[int, int] | None = None) -> bytes:
    """Pack a user's position. positions, forgotten: the last applied and the last forgotten offset per partition."""
    text = f"{epoch}|{_pack_offsets(positions)}"
    return (f"{text}|{_pack_offsets(forgotten)}" if forgotten else text).encode()


def unpack_positions(epoch: str, text: bytes | None) -> tuple[dict[int, int], dict[int, int]] | None:
    """Return (positions, forgotten); None without a value of this epoch."""
    if not text:
        return None
    written, positions, *forgotten = text.decode().split("|")
    if written != epoch:
        return None
    return _unpack_offsets(positions), _unpack_offsets(forgotten[0]) if forgotten else {}


def trace_text(partition: int, offset: int, traceparent: str) -> str:
    return f"{partition}:{offset} {traceparent}"


def traceparent_of(trace: bytes, partition: int, offset: int) -> str:
    """The inverse of `trace_text`; "" if the trace has another position."""
    position, _, traceparent = trace.decode(errors="replace").partition(" ")
    return traceparent if position == f"{partition}:{offset}" else ""


def reaches(state_position: bytes | None, history_position: bytes | None) -> bool:
    """Return whether a state reflects the whole history. The state may be read later than the history."""
    if not history_position or not state_position:
        return False
    if state_position == history_position:
        return True
    epoch, newest, *forgotten = history_position.decode().split("|")
    state = unpack_positions(epoch, state_position)
    return (
        state is not None
        and covers(state[0], _unpack_offsets(newest))
        and covers(state[1], _unpack_offsets("".join(forgotten)))
    )
