"""How user states, histories and stream progress lie in Redis: keys, packed values, and the Lua that changes them.

Only `state_store` uses this. A user's keys lie with the partition that Kafka's partitioner gives to the user id, the
user's home: all users of a partition, the table of who they are and the partition's progress share one hash slot, so
they are on one node, fail over together, and one script can touch them. Values are bounded, and user keys carry a TTL.

A user's position is written as `epoch|partition:offset,...|partition:offset,...`: what an earlier epoch left behind (a
half-emptied Redis) then reads as absent. The second list says up to where the user was forgotten: it is part of the
text that every write compares, so a write prepared before a forget cannot bring back what the forget took away.

The table of users says of each one up to where her home partition was applied, and until when her keys live. A user
whose keys are gone, or say less than the table, is lost: not new.
"""

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


def history_key(home: Home) -> str:
    return f"{{p{home.partition}}}:history:{home.user_id}"


def seen_key(home: Home) -> str:
    return f"{{p{home.partition}}}:seen:{home.user_id}"


def state_key(home: Home, model_version: str) -> str:
    return f"{{p{home.partition}}}:state:{model_version}:{home.user_id}"


# What a gateway keeps of a user for a while (`session_store`).
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
    """Items by level (`algorithms.popularity`) of the partition's records: at most MAX_POPULAR, some 100 bytes each."""
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


# KEYS history, seen, state, users, progress. ARGV: expected position, position, ttl seconds, events, recent ids, most
# seen items, state operation (set, drop or keep), user id, entry in the table, epoch, watermark that the
# writer knows of the home partition (empty: it is another process's), items turned down (joined with NUL), number of
# items no longer seen, those items, number of seen items, (time, item) each, number of words of the state, its fields
# and values.
# A writer that missed a failover knows another watermark than the store: nothing of it is written. `unfinished` counts
# the users written since the watermark moved; ADVANCE wants them all. Nor is anything written by another process where
# the progress is of another epoch: a store that went back to one has its own table of users.
_EXPECT = """
local current = redis.call('HGET', KEYS[1], 'position') or ''
if current ~= ARGV[1] then return 0 end
if ARGV[11] == '' and (redis.call('HGET', KEYS[5], 'epoch') or ARGV[10]) ~= ARGV[10] then return 0 end
"""
_WRITE = """
if ARGV[11] ~= '' then
  local found = redis.call('HMGET', KEYS[5], 'epoch', 'watermark')
  if found[1] ~= ARGV[10] or found[2] ~= ARGV[11] then return 0 end
  redis.call('HINCRBY', KEYS[5], 'unfinished', 1)
end
if redis.call('HGET', KEYS[4], '') ~= ARGV[10] then
  redis.call('DEL', KEYS[4])
  redis.call('HSET', KEYS[4], '', ARGV[10])
end
redis.call('HSET', KEYS[4], ARGV[8], ARGV[9])
redis.call('HSET', KEYS[1], 'position', ARGV[2], 'events', ARGV[4], 'ids', ARGV[5])
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[1], 'turned_down', ARGV[12])
else
  redis.call('HDEL', KEYS[1], 'turned_down')
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
local at = 13
local gone = tonumber(ARGV[at])
for i = 1, gone do redis.call('ZREM', KEYS[2], ARGV[at + i]) end
at = at + gone + 1
local seen = tonumber(ARGV[at])
for i = 1, seen do redis.call('ZADD', KEYS[2], 'GT', ARGV[at + 2 * i - 1], ARGV[at + 2 * i]) end
at = at + 2 * seen + 1
if seen > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -(tonumber(ARGV[6]) + 1))
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
if ARGV[7] == 'set' then
  redis.call('HSET', KEYS[3], 'history_position', ARGV[2], unpack(ARGV, at + 1, at + tonumber(ARGV[at])))
  redis.call('EXPIRE', KEYS[3], ARGV[3])
elseif ARGV[7] == 'drop' then
  redis.call('DEL', KEYS[3])
elseif redis.call('HGET', KEYS[3], 'history_position') == ARGV[1] then
  redis.call('HSET', KEYS[3], 'history_position', ARGV[2])
end
return 1
"""

# Seen items that were lost since the user was loaded are not begun anew: with one of them there, nobody would miss the
# others.
APPLY = (
    _EXPECT
    + """
if redis.call('HSTRLEN', KEYS[1], 'events') > 0 and redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
"""
    + _WRITE
)
# The same in the place of all that is stored. KEYS 6: progress in `forgets`; 7 and on: what else there may be of the
# user, lists of sessions and a state per other model version.
# An empty position: nothing is to stay. The last three of ARGV: the reader of `forgets` that writes (empty: it is
# somebody else), its progress as it has to be and as it is then; a node that lacks an earlier forget, or an earlier
# user of this one, is told by it.
REWRITE = (
    _EXPECT
    + """
local reader = ARGV[#ARGV - 2]
if reader ~= '' then
  if (redis.call('HGET', KEYS[6], reader) or '') ~= ARGV[#ARGV - 1] then return 0 end
  redis.call('HSET', KEYS[6], reader, ARGV[#ARGV])
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], unpack(KEYS, 7))
if ARGV[2] == '' then return 1 end
"""
    + _WRITE
)

# A state of a model beside the writer's own. KEYS history, state. ARGV: the position that the history has to have, the
# one that it had before, ttl seconds, state operation (set, drop or keep), the state's fields and values; set with none
# of them says that this history makes no state.
WRITE_STATE = """
if redis.call('HGET', KEYS[1], 'position') ~= ARGV[1] then return 0 end
if ARGV[4] == 'set' then
  if #ARGV == 4 then redis.call('DEL', KEYS[2]) end
  redis.call('HSET', KEYS[2], 'history_position', ARGV[1], unpack(ARGV, 5))
  redis.call('EXPIRE', KEYS[2], ARGV[3])
elseif ARGV[4] == 'drop' then
  redis.call('DEL', KEYS[2])
elseif redis.call('HGET', KEYS[2], 'history_position') == ARGV[2] then
  redis.call('HSET', KEYS[2], 'history_position', ARGV[1])
end
return 1
"""

# A partition's progress begins in an epoch. KEYS progress, popular. ARGV: the epoch that was found there (empty: none),
# and the one that was the current one after that: a process that was paused in between does not put an older one back.
BEGIN = """
if (redis.call('HGET', KEYS[1], 'epoch') or '') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'watermark', '-1', 'unfinished', 0)
return 1
"""

# KEYS progress, popular. ARGV: epoch, expected watermark, new watermark, users written since the last one (empty: not
# known), anchors (empty: as they are), number of words of counts, (field, increment) each; where something is popular:
# the half-life (another one begins anew), most items, seconds to live, number of words of what joins, (item, level)
# each, then the same of what goes. A node that took over and lacks one of those users lacks this count, too.
ADVANCE = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'watermark', 'unfinished')
if found[1] ~= ARGV[1] or found[2] ~= ARGV[2] then return 0 end
if ARGV[4] ~= '' and tonumber(found[3] or '0') ~= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], 'watermark', ARGV[3], 'unfinished', 0)
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'anchors', ARGV[5]) end
local at = 6 + tonumber(ARGV[6])
for i = 7, at, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
if at == #ARGV then return 1 end
if redis.call('HGET', KEYS[1], 'half_life') ~= ARGV[at + 1] then
  redis.call('DEL', KEYS[2])
  redis.call('HSET', KEYS[1], 'half_life', ARGV[at + 1])
end
local join = at + 4
local go = join + tonumber(ARGV[join])
for i = join + 1, #ARGV, 2 do
  local before, level = redis.call('ZSCORE', KEYS[2], ARGV[i]), tonumber(ARGV[i + 1])
  if i <= go then
    if before then
      before = tonumber(before)
      local high, low = math.max(before, level), math.min(before, level)
      level = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
    end
    redis.call('ZADD', KEYS[2], string.format('%.17g', level), ARGV[i])
  elseif before then
    before = tonumber(before)
    local left = 1 - 2 ^ math.min(0, level - before)
    if left > 0.000000001 then
      redis.call('ZADD', KEYS[2], string.format('%.17g', before + math.log(left) / math.log(2)), ARGV[i])
    else
      redis.call('ZREM', KEYS[2], ARGV[i])
    end
  end
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -(tonumber(ARGV[at + 2]) + 1))
redis.call('EXPIRE', KEYS[2], ARGV[at + 3])
return 1
"""

# KEYS progress, popular. ARGV: epoch. Answers the half-life, then items and levels in turn, highest first, as one
# string; two empty ones where there is nothing of this epoch.
READ_POPULAR = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'half_life')
if found[1] ~= ARGV[1] or not found[2] then return {'', ''} end
return {found[2], table.concat(redis.call('ZREVRANGE', KEYS[2], 0, -1, 'WITHSCORES'), '\\0')}
"""

# KEYS progress in `forgets`. ARGV: reader, its progress as it has to be, and as it is then.
NOTE_FORGETS = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

# KEYS epoch. ARGV: expected epoch, new epoch.
REPLACE_EPOCH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""

# One string instead of thousands of small ones: redis-py parses replies in Python (2,000 items: 4 ms against 0.1 ms).
# KEYS history, seen, state, users, progress. ARGV: user id, epoch, whether seen items are wanted (1), fields of the
# state. Answers entry in the table, position, bytes of events, number of seen items, seen items newest first, the
# state, epoch and watermark of the home partition, and items turned down.
READ_USER = """
local entry = false
if redis.call('HGET', KEYS[4], '') == ARGV[2] then entry = redis.call('HGET', KEYS[4], ARGV[1]) end
local seen, turned_down = '', false
if ARGV[3] == '1' then
  seen = table.concat(redis.call('ZREVRANGE', KEYS[2], 0, -1), '\\0')
  turned_down = redis.call('HGET', KEYS[1], 'turned_down')
end
return {
  entry, redis.call('HGET', KEYS[1], 'position'), redis.call('HSTRLEN', KEYS[1], 'events'),
  redis.call('ZCARD', KEYS[2]), seen, redis.call('HMGET', KEYS[3], unpack(ARGV, 4)),
  redis.call('HMGET', KEYS[5], 'epoch', 'watermark'), turned_down
}
"""

# All that is stored of a user but states. KEYS history, seen, users. ARGV: user id, epoch. Answers entry in the table,
# position, events, ids, then seen items and times in turn, as one string.
DUMP = """
local entry = false
if redis.call('HGET', KEYS[3], '') == ARGV[2] then entry = redis.call('HGET', KEYS[3], ARGV[1]) end
local found = redis.call('HMGET', KEYS[1], 'position', 'events', 'ids')
table.insert(found, 1, entry)
found[5] = table.concat(redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'), '\\0')
return found
"""

# Users of whom nothing is there yet are to be restored. KEYS users, progress. ARGV: epoch, table entry, user ids.
SEED = """
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[1] then return 0 end
if redis.call('HGET', KEYS[1], '') ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], '', ARGV[1])
end
for i = 3, #ARGV do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[2]) end
return 1
"""

# Who is in the table without keys, or has events without seen items. KEYS users. ARGV: cursor, about how many to look
# at, the epoch, what history and seen keys begin with. Answers the next cursor, then user ids and entries in turn.
FIND_LOST = """
if redis.call('HGET', KEYS[1], '') ~= ARGV[3] then return {'0'} end
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local found = {page[1]}
for i = 1, #page[2], 2 do
  local user = page[2][i]
  if user ~= '' then
    local history = ARGV[4] .. user
    local lost = redis.call('EXISTS', history) == 0
    if not lost and redis.call('HSTRLEN', history, 'events') > 0 then
      lost = redis.call('EXISTS', ARGV[5] .. user) == 0
    end
    if lost then
      found[#found + 1] = user
      found[#found + 1] = page[2][i + 1]
    end
  end
end
return found
"""
