"""The Lua scripts that read and change the keys of `layout.py`, each in one hash slot."""

# KEYS history, seen, state, users, progress. ARGV 1 to 6: expected position, new position, TTL in seconds, events,
# recent ids, maximum number of seen items. 7 to 12: state operation (set, drop or keep), user id, table entry, epoch,
# the writer's watermark of the home partition (empty if another process owns the partition), rejected items joined with
# NUL. From 13 on: the number of items that are no longer seen, and these items; the number of seen items, and time and
# item of each; the number of the state's fields and values together, and these in turn. A writer that missed a failover
# has another watermark and writes nothing. A process without the home partition writes nothing if the progress has
# another epoch. ADVANCE checks `unfinished`, the number of users written.
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

# Writes nothing if seen items were lost since loading: one new item would hide the loss.
APPLY = (
    _EXPECT
    + """
if redis.call('HSTRLEN', KEYS[1], 'events') > 0 and redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
"""
    + _WRITE
)
# Replaces all data of a user; an empty position erases the user. KEYS 6: progress in `forgets`; from 7 on: the user's
# session lists and states of other model versions. The last three of ARGV: the name of the reader of `forgets` (empty
# if the writer is not such a reader), its expected progress, its new progress. They detect a node that lacks an earlier
# forget or rewrite.
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

# Write a state of another model (`ModelState`). KEYS history, state. ARGV: expected history position, the position
# before it, TTL in seconds, state operation (set, drop or keep), the state's fields and values.
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

# Begin a partition's progress in an epoch. KEYS progress, popular. ARGV: the epoch found in the progress (empty: none),
# and the current epoch. The caller first reads the progress, then the current epoch. If it is paused afterwards and
# another process begins a newer epoch, the progress has changed, and this script writes nothing.
BEGIN = """
if (redis.call('HGET', KEYS[1], 'epoch') or '') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'watermark', '-1', 'unfinished', 0)
return 1
"""

# KEYS progress, popular. ARGV 1 to 5: epoch, expected watermark, new watermark, number of users written since the last
# ADVANCE (empty if unknown), the anchors of `log_identity.py` (empty if unchanged). 6: twice the number of changed
# counts, followed by field and increment of each. If popular items change, there follow: the half-life (a new one
# clears the items), maximum number of items, TTL in seconds, twice the number of added levels, item and level of each,
# then item and level of each removed level. A failover node that lacks a written user has also not counted this user in
# `unfinished`.
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

# KEYS progress, popular. ARGV: epoch. Returns the half-life, then items and levels in turn as one string, highest
# first; two empty strings without data of this epoch.
READ_POPULAR = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'half_life')
if found[1] ~= ARGV[1] or not found[2] then return {'', ''} end
return {found[2], table.concat(redis.call('ZREVRANGE', KEYS[2], 0, -1, 'WITHSCORES'), '\\0')}
"""

# KEYS progress in `forgets`. ARGV: reader, expected progress, new progress.
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

# KEYS history, seen, state, users, progress. ARGV: user id, epoch, whether to return seen items (1), fields of the
# state. Returns the table entry, position, bytes of events, number of seen items, seen items (newest first), the state,
# epoch and watermark of the home partition, and rejected items. The seen items are one string, because redis-py parses
# replies in Python: 2,000 items take 0.1 ms instead of 4 ms.
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

# Read a user's data except the states. KEYS history, seen, users. ARGV: user id, epoch. Returns the table entry,
# position, events, ids, then seen items and times in turn as one string.
DUMP = """
local entry = false
if redis.call('HGET', KEYS[3], '') == ARGV[2] then entry = redis.call('HGET', KEYS[3], ARGV[1]) end
local found = redis.call('HMGET', KEYS[1], 'position', 'events', 'ids')
table.insert(found, 1, entry)
found[5] = table.concat(redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'), '\\0')
return found
"""

# Add users to the table, where they count as lost. KEYS users, progress. ARGV: epoch, table entry, user ids.
SEED = """
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[1] then return 0 end
if redis.call('HGET', KEYS[1], '') ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], '', ARGV[1])
end
for i = 3, #ARGV do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[2]) end
return 1
"""

# Find the table's users without keys, or with events and no seen items. KEYS users. ARGV: cursor, approximate number of
# users to scan, epoch, prefixes of history and seen keys. Returns the next cursor, then user ids and entries in turn.
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
