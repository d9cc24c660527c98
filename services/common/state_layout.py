"""How user states, histories and stream progress lie in Redis: keys, packed values, and the Lua that changes them.

Only `state_store` uses this. Values are bounded, user keys carry a TTL, and the literal braces around the user id
are Redis Cluster's hash tag, so one user's keys stay together. A user's position is written as
`epoch|partition:offset,...|partition:offset,...`: what an earlier epoch left behind (a half-emptied Redis) then reads
as absent. The second list says up to where the user was forgotten: it is part of the text that every write compares,
so a write that was prepared before a forget cannot bring back what the forget took away.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.common.errors import PreconditionFailed

EPOCH_KEY = "stream:epoch"
# Exists (with a TTL) while an import fills the store and the consumer has to wait.
HOLD_KEY = "stream:hold"
# The model versions that states were ever stored for; whoever stores one names it here first.
MODELS_KEY = "stream:models"
# Per reader of `forgets`, `epoch|offset` of the last record that it has applied to this store.
FORGETS_KEY = "stream:forgets"
# Every key of every user.
USER_KEYS = "u:{*"
COUNT_FIELDS = ("applied", "duplicates", "dead_lettered", "unknown_items", "undone", "late", "forgotten")
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
# Beside them: the position of the history that the state reflects, as the history's own `position` has it. It moves
# with the history while that stays the same (a duplicate came), and stands still while another model's process writes.
STATE_POSITION = "history_position"


class StoredEvent(NamedTuple):
    """One event of a history. Order: (event_time_ms, partition, offset). id_hash: see `hash_event_id`."""

    event_time_ms: int
    partition: int
    offset: int
    id_hash: int
    item_id: str


class RecentId(NamedTuple):
    """An event id (hashed) that came lately, the position that brought it, and what became of that record.

    `outcome` is the writer's own code (0-255): a record that is delivered again is counted as it was the first time.
    item_id: the item of an interaction that counts, so that it can be undone after it has left the history; else "".
    """

    id_hash: int
    partition: int
    offset: int
    outcome: int
    item_id: str = ""


def _tagged(user_id: str) -> str:
    if "{" in user_id or "}" in user_id or "%" in user_id:
        user_id = user_id.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return "u:{" + user_id + "}"


def history_key(user_id: str) -> str:
    return _tagged(user_id) + ":history"


def seen_key(user_id: str) -> str:
    return _tagged(user_id) + ":seen"


def state_key(user_id: str, model_version: str) -> str:
    return f"{_tagged(user_id)}:state:{model_version}"


def progress_key(partition: int) -> str:
    return f"stream:{partition}:progress"


def hash_event_id(event_id: str) -> int:
    """64 bits of an event id. Two of the hundred-odd recent ids of one user collide with chance 1e-17."""
    return int.from_bytes(hashlib.blake2b(event_id.encode(), digest_size=8).digest(), "little")


_HEADER = struct.Struct("<BI")
_EVENT = struct.Struct("<qiqQ")
_RECENT = struct.Struct("<QiqB")
_FORMAT = 1


def pack_events(events: Iterable[StoredEvent]) -> bytes:
    """Fixed parts first, then the item ids separated by NUL (which no id may hold)."""
    events = list(events)
    if not events:
        return b""
    pack = _EVENT.pack
    fixed = b"".join([pack(time, partition, offset, id_hash) for time, partition, offset, id_hash, _ in events])
    return _HEADER.pack(_FORMAT, len(events)) + fixed + "\0".join([event[4] for event in events]).encode()


def unpack_events(blob: bytes | None) -> list[StoredEvent]:
    """The inverse of `pack_events`. Raises: PreconditionFailed when the blob was written in another format."""
    if not blob:
        return []
    layout, count = _HEADER.unpack_from(blob)
    if layout != _FORMAT:
        raise PreconditionFailed(
            f"a history has format {layout}, this version reads {_FORMAT}: a newer version of Freshet wrote it. Run "
            "that version, or empty the state store: it is filled again from the topic"
        )
    end = _HEADER.size + count * _EVENT.size
    items = blob[end:].decode().split("\0")
    fixed = _EVENT.iter_unpack(blob[_HEADER.size : end])
    return [StoredEvent._make((*event, item)) for event, item in zip(fixed, items, strict=True)]


def pack_recent(recent: Iterable[RecentId]) -> bytes:
    pack = _RECENT.pack
    return b"".join([pack(*entry[:4]) for entry in recent])


def pack_recent_items(recent: Iterable[RecentId]) -> bytes:
    """Their item ids, separated by NUL, in a field of their own: what an earlier version wrote still reads."""
    return "\0".join([entry[4] for entry in recent]).encode()


def unpack_recent(blob: bytes | None, items: bytes | None) -> list[RecentId]:
    if not blob:
        return []
    fixed = list(_RECENT.iter_unpack(blob))
    item_ids = items.decode().split("\0") if items else [""] * len(fixed)
    return [RecentId._make((*entry, item_id)) for entry, item_id in zip(fixed, item_ids, strict=True)]


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


def reaches(state_position: bytes | None, partition: int, offset: int, history_position: bytes | None) -> bool:
    """Whether a state reflects the whole history beside it; read after the history's position, it may be ahead.

    partition, offset: the state's own fields, for states that an earlier version stored without a position.
    """
    if not history_position:
        return False
    if state_position == history_position:
        return True
    epoch, newest, *forgotten = history_position.decode().split("|")
    if state_position is None:
        return _covers({partition: offset}, _unpack_offsets(newest))
    state = unpack_positions(epoch, state_position)
    return (
        state is not None
        and _covers(state[0], _unpack_offsets(newest))
        and _covers(state[1], _unpack_offsets("".join(forgotten)))
    )


def _covers(reached: Mapping[int, int], wanted: Mapping[int, int]) -> bool:
    return all(reached.get(partition, -1) >= offset for partition, offset in wanted.items())


# KEYS history, seen, state. ARGV: expected position, position, ttl seconds, events, recent, items of recent, most seen
# items, state operation (set, drop or keep), number of items no longer seen, those items, number of seen items,
# (time, item) each, then the state's fields and values.
APPLY = """
local current = redis.call('HGET', KEYS[1], 'position') or ''
if current ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'position', ARGV[2], 'events', ARGV[4], 'recent', ARGV[5], 'recent_items', ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[3])
local at = 9
local gone = tonumber(ARGV[at])
for i = 1, gone do redis.call('ZREM', KEYS[2], ARGV[at + i]) end
at = at + gone + 1
local seen = tonumber(ARGV[at])
for i = 1, seen do redis.call('ZADD', KEYS[2], 'GT', ARGV[at + 2 * i - 1], ARGV[at + 2 * i]) end
at = at + 2 * seen + 1
if seen > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -(tonumber(ARGV[7]) + 1))
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
if ARGV[8] == 'set' then
  redis.call('HSET', KEYS[3], 'history_position', ARGV[2], unpack(ARGV, at))
  redis.call('EXPIRE', KEYS[3], ARGV[3])
elseif ARGV[8] == 'drop' then
  redis.call('DEL', KEYS[3])
elseif redis.call('HGET', KEYS[3], 'history_position') == ARGV[1] then
  redis.call('HSET', KEYS[3], 'history_position', ARGV[2])
end
return 1
"""

# KEYS history, seen, then a state per model version. ARGV: expected position. What is to stay (the position, at least)
# is written by APPLY in the same transaction.
ERASE = """
local current = redis.call('HGET', KEYS[1], 'position') or ''
if current ~= ARGV[1] then return 0 end
redis.call('DEL', unpack(KEYS))
return 1
"""

# KEYS progress. ARGV: epoch, expected watermark, new watermark, anchors (empty: as they are), then (field, increment)
# pairs.
ADVANCE = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'watermark')
local current = '-1'
if found[1] == ARGV[1] then current = found[2] or '-1' end
if current ~= ARGV[2] then return 0 end
if found[1] ~= ARGV[1] then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'watermark', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'anchors', ARGV[4]) end
for i = 5, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""

# KEYS epoch. ARGV: expected epoch, new epoch.
REPLACE_EPOCH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""

# One long string instead of thousands of small ones: redis-py parses replies in Python (2,000 items: 4 ms against
# 0.1 ms). KEYS seen. Newest first.
READ_SEEN = "return table.concat(redis.call('ZREVRANGE', KEYS[1], 0, -1), '\\0')"
