"""What a gateway keeps beside a user for a while: short Redis lists of bytes, newest first, bounded in number and time.

They lie in the hash slot of the user's other keys and go with them: a forget removes them, and so does whatever empties
the store. Nothing rests on them that cannot be asked for anew. What the bytes mean is not known here.
"""

from collections.abc import Awaitable, Callable, Mapping

from services.common.errors import DependencyUnavailable
from services.common.redis_clients import open_async_client
from services.common.state_layout import Home, session_key
from services.common.state_store import redis_errors

# KEYS list. ARGV: entry, most entries, seconds to live.
_PUSH = """
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], 0, tonumber(ARGV[2]) - 1)
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


class SessionStore:
    """For an asyncio process. Connects when first used."""

    def __init__(
        self,
        url: str,
        home: Callable[[str], Awaitable[Home | None]],
        *,
        timeout_s: float = 0.25,
        max_connections: int = 64,
    ) -> None:
        """home: where a user's keys are (`StateReader.home`)."""
        self._redis = open_async_client(url, timeout_s=timeout_s, max_connections=max_connections)
        self._home = home
        self._push = self._redis.register_script(_PUSH)

    async def push(self, kind: str, user_id: str, entry: bytes, *, most: int, ttl_seconds: int) -> None:
        """Put an entry in front of the user's list of this kind (of `state_layout.SESSION_KINDS`), which keeps the
        newest `most` and ends `ttl_seconds` after the last one.

        Raises: DependencyUnavailable, before the stream's first epoch, too.
        """
        home = await self._home(user_id)
        if home is None:
            raise DependencyUnavailable("the state store has no epoch yet: nothing can be kept beside a user")
        with redis_errors():
            await self._push(keys=[session_key(home, kind)], args=[entry, most, ttl_seconds])

    async def read(self, user_id: str, wanted: Mapping[str, int]) -> Mapping[str, list[bytes]]:
        """By kind the newest entries, at most so many, newest first. Raises: DependencyUnavailable."""
        home = await self._home(user_id)
        if home is None:
            return {kind: [] for kind in wanted}
        pipeline = self._redis.pipeline(transaction=False)
        for kind, most in wanted.items():
            pipeline.lrange(session_key(home, kind), 0, most - 1)
        with redis_errors():
            return dict(zip(wanted, await pipeline.execute(), strict=True))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
