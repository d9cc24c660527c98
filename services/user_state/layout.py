"""How user states, histories and stream progress lie in Redis: keys and packed values. `scripts.py` changes them.

A user's keys lie with the partition that Kafka's partitioner gives to the user id, the
user's home: all users of a partition, the table of who they are and the partition's progress share one hash slot, so
they are on one node, fail over together, and one script can touch them. Values are bounded, and user keys carry a TTL.

A user's position is written as `epoch|partition:offset,...|partition:offset,...`: what an earlier epoch left behind (a
half-emptied Redis) then reads as absent. The second list says up to where the user was forgotten: it is part of the
text that every write compares, so a write prepared before a forget cannot bring back what the forget took away.

The table of users says of each one up to where her home partition was applied, and until when her keys live. A user
whose keys are gone, or say less than the table, is lost: not new.
"""

import secrets
from collections.abc import Mapping
from typing import NamedTuple

from services.platform.errors import PreconditionFailed
from services.platform.stream.kafka import partition_for

# `random-N`: made when the store is filled for the first time. N is the number of partitions that homes are counted in.
EPOCH_KEY = "stream:epoch"
# Exists (with a TTL) while an import fills the store and the consumer has to wait.
HOLD_KEY = "stream:hold"
# The model versions that states were ever stored for; whoever stores one names it here first.
MODELS_KEY = "stream:models"
# Every key that belongs to a partition: users, the table of them, progress.
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
# Of a partition, the most popular; what falls out begins anew with its next event, which weighs more than what is old.
MAX_POPULAR = 2_000
# Beside them: the position of the history that the state reflects, as the history's own `position` has it. It moves
# with the history while that stays the same (a duplicate came), and stands still while another model's process writes.
STATE_POSITION = "history_position"
# Only of a state that a traced event made: `partition:offset traceparent`. A later write without a trace leaves it
# behind: then the position is another one.
STATE_TRACE = "trace"


class Home(NamedTuple):
    """Where a user's keys lie, and the user id."""

    partition: int
    user_id: str


def home_of(user_id: str, epoch: str) -> Home:
    """The user's home in this epoch. Raises: as `num_partitions_of`."""
    return Home(partition_for(user_id.encode(), num_partitions_of(epoch)), user_id)


def num_partitions_of(epoch: str) -> int:
    """The number of partitions that homes are counted in. Raises: PreconditionFailed for another version's epoch."""
    _, dash, number = epoch.rpartition("-")
    if not dash or not number.isdecimal():
        raise PreconditionFailed(
            f"{EPOCH_KEY}={epoch!r:.80} in the state store; allowed: <random>-<partitions>, as this version writes it. "
            "Empty the state store: it is filled again from the topic"
        )
    return int(number)


def new_epoch(num_partitions: int) -> str:
    """One that no store ever had."""
    return f"{secrets.token_hex(8)}-{num_partitions}"


def check_epoch(epoch: str, num_partitions: int) -> None:
    """Raises: PreconditionFailed unless the store was filled by this layout, from so many partitions."""
    stored = num_partitions_of(epoch)
    if stored != num_partitions:
        raise PreconditionFailed(
            f"the state store was filled from {stored} partitions of `interactions`, which has {num_partitions} now: "
            "users moved. Run `freshet repartition`, or empty the state store: it is filled again from the topic"
        )


def history_key(home: Home) -> str:
    return f"{{p{home.partition}}}:history:{home.user_id}"


def seen_key(home: Home) -> str:
    return f"{{p{home.partition}}}:seen:{home.user_id}"


def state_key(home: Home, model_version: str) -> str:
    return f"{{p{home.partition}}}:state:{model_version}:{home.user_id}"


# What a gateway keeps of a user for a while (`sessions.py`).
PAGES, ANSWERS, IMPRESSIONS = "pages", "answers", "impressions"
SESSION_KINDS = (PAGES, ANSWERS, IMPRESSIONS)


def session_key(home: Home, kind: str) -> str:
    """Of a list of one of the kinds above."""
    return f"{{p{home.partition}}}:{kind}:{home.user_id}"


def session_sizes_key(partition: int) -> str:
    """How many bytes the lists of a partition's users take, by the time when they end."""
    return f"{{p{partition}}}:session_sizes"


def users_key(partition: int) -> str:
    return f"{{p{partition}}}:users"


def progress_key(partition: int) -> str:
    return f"{{p{partition}}}:progress"


def popular_key(partition: int) -> str:
    """Items by level (`algorithms.items.popularity`) of its records: at most MAX_POPULAR, 100 bytes each."""
    return f"{{p{partition}}}:popular"


def forgets_key(partition: int) -> str:
    """Per reader of `forgets`: `forgets_text`."""
    return f"{{p{partition}}}:forgets"


def forgets_text(epoch: str, offset: int, rewritten: int = 0) -> str:
    """Up to where `forgets` is applied to a partition's users, and how many were written since then."""
    return f"{epoch}|{offset}|{rewritten}" if rewritten else f"{epoch}|{offset}"


def unpack_forgets(epoch: str, text: str) -> tuple[int, int]:
    """The inverse of `forgets_text`; (-1, 0) where there is nothing of this epoch."""
    written, *numbers = text.split("|")
    offset, rewritten = (*map(int, numbers), 0)[:2] if written == epoch and numbers else (-1, 0)
    return offset, rewritten


# Field of the table of users (no user id is empty): the epoch that the table is of.
TABLE_EPOCH = ""


def pack_entry(offset: int, expires_s: int) -> str:
    """A user's entry in the table: the last applied offset of the home partition (-1: none), and when the keys expire
    (Unix seconds)."""
    return f"{offset}:{expires_s}"


def unpack_entry(entry: bytes | None, now_s: float) -> int | None:
    """The offset of an entry; None when there is none or the user's keys have expired."""
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
    """positions: last applied offset per partition. forgotten: last forgotten one, for users who were forgotten."""
    text = f"{epoch}|{_pack_offsets(positions)}"
    return (f"{text}|{_pack_offsets(forgotten)}" if forgotten else text).encode()


def unpack_positions(epoch: str, text: bytes | None) -> tuple[dict[int, int], dict[int, int]] | None:
    """(positions, forgotten) as packed; None when nothing is stored, or an earlier epoch stored it."""
    if not text:
        return None
    written, positions, *forgotten = text.decode().split("|")
    if written != epoch:
        return None
    return _unpack_offsets(positions), _unpack_offsets(forgotten[0]) if forgotten else {}


def trace_text(partition: int, offset: int, traceparent: str) -> str:
    """What STATE_TRACE holds beside the state of this position."""
    return f"{partition}:{offset} {traceparent}"


def traceparent_of(trace: bytes, partition: int, offset: int) -> str:
    """The inverse of `trace_text`; "" where it is of another position than the state beside it."""
    position, _, traceparent = trace.decode(errors="replace").partition(" ")
    return traceparent if position == f"{partition}:{offset}" else ""


def reaches(state_position: bytes | None, history_position: bytes | None) -> bool:
    """Whether a state reflects the whole history beside it; read after the history's position, it may be ahead."""
    if not history_position or not state_position:
        return False
    if state_position == history_position:
        return True
    epoch, newest, *forgotten = history_position.decode().split("|")
    state = unpack_positions(epoch, state_position)
    return (
        state is not None
        and _covers(state[0], _unpack_offsets(newest))
        and _covers(state[1], _unpack_offsets("".join(forgotten)))
    )


def _covers(reached: Mapping[int, int], wanted: Mapping[int, int]) -> bool:
    return all(reached.get(partition, -1) >= offset for partition, offset in wanted.items())
