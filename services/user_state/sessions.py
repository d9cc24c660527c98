"""Short-lived lists of bytes per user for the gateway, newest entry first, bounded in number and time (decision 050).

Forgetting a user or emptying the store removes them. Only a user with a history has lists. All lists use at most a
tenth of Redis' memory (`maxmemory`, or else the machine's memory).
"""

from collections.abc import Awaitable, Callable, Mapping

from services.platform.errors import DependencyUnavailable, PreconditionFailed
from services.platform.redis_clients import open_async_client
from services.user_state.layout import history_key, home_of, num_partitions_of, session_key, session_sizes_key
from services.user_state.values import redis_errors

# KEYS list, history, sizes. ARGV: entry, most entries, TTL in seconds, number of partitions. Returns 1, 0 without a
# history, or -1 if the partition's lists exceed their memory. sizes: bytes of all lists of the partition by expiry, in
# steps of a sixteenth of a list's TTL. A list expires at a step's end, so its remaining TTL determines its step.
_PUSH = """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local now, step, total = tonumber(redis.call('TIME')[1]), math.ceil(ARGV[3] / 16), #ARGV[1]
local sizes = redis.call('HGETALL', KEYS[3])
for i = 1, #sizes, 2 do
  if tonumber(sizes[i]) < now then redis.call('HDEL', KEYS[3], sizes[i]) else total = total + sizes[i + 1] end
end
local memory = redis.call('INFO', 'memory')
local room = tonumber(memory:match('maxmemory:(%d+)'))
if room == 0 then room = tonumber(memory:match('total_system_memory:(%d+)')) end
if total > room / 10 / ARGV[4] then return -1 end
local function count(sign)
  local ends = math.floor((now + redis.call('TTL', KEYS[1])) / step + 0.5) * step
  redis.call('HINCRBY', KEYS[3], ends, sign * (redis.call('MEMORY', 'USAGE', KEYS[1]) or 0))
end
if redis.call('EXISTS', KEYS[1]) == 1 then count(-1) end
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], 0, tonumber(ARGV[2]) - 1)
redis.call('EXPIREAT', KEYS[1], math.ceil((now + ARGV[3]) / step) * step)
count(1)
return 1
"""


class SessionStore:
    """Stores lists from an asyncio process; connects on first use."""

    def __init__(
        self,
        url: str,
        epoch: Callable[[], Awaitable[str]],
        *,
        timeout_s: float = 0.25,
        max_connections: int = 64,
    ) -> None:
        """epoch: returns the store's epoch (`StateReader.last_epoch`); "" before the first epoch."""
        self._redis = open_async_client(url, timeout_s=timeout_s, max_connections=max_connections)
        self._epoch = epoch
        self._push = self._redis.register_script(_PUSH)

    async def push(self, kind: str, user_id: str, entry: bytes, *, most: int, ttl_seconds: int) -> bool:
        """Prepend an entry to the user's list of this kind (of `layout.SESSION_KINDS`).

        The list has at most `most` entries and expires about `ttl_seconds` after the last push. Return False, and store
        nothing, if the user has no history.

        Raises: DependencyUnavailable, also before the stream's first epoch; PreconditionFailed if the lists use up
        their memory.
        """
        epoch = await self._epoch()
        if not epoch:
            raise DependencyUnavailable("the state store has no epoch yet: no session can be stored")
        home = home_of(user_id, epoch)
        keys = [session_key(home, kind), history_key(home), session_sizes_key(home.partition)]
        with redis_errors():
            num_stored = await self._push(keys=keys, args=[entry, most, ttl_seconds, num_partitions_of(epoch)])
        if num_stored < 0:
            raise PreconditionFailed("sessions use their tenth of Redis' memory; give Redis more (maxmemory)")
        return bool(num_stored)

    async def read(self, user_id: str, wanted: Mapping[str, int]) -> Mapping[str, list[bytes]]:
        """The newest entries by kind, at most the wanted number, newest first. Raises: DependencyUnavailable."""
        epoch = await self._epoch()
        if not epoch:
            return {kind: [] for kind in wanted}
        home = home_of(user_id, epoch)
        pipeline = self._redis.pipeline(transaction=False)
        for kind, most in wanted.items():
            pipeline.lrange(session_key(home, kind), 0, most - 1)
        with redis_errors():
            return dict(zip(wanted, await pipeline.execute(), strict=True))

    async def close(self) -> None:
        await self._redis.aclose()
