"""A state store of an earlier layout becomes one of today's, in place (`freshet upgrade`).

Before, a user's keys were tagged by user, progress lay in another hash slot, and nobody kept a table of users. Each
user is moved in one transaction and the epoch is changed last, so an upgrade that broke off goes on when it is run
again, and whatever runs today's version refuses the store until it is done.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import redis

from services.common import state_layout as layout
from services.common.errors import PreconditionFailed

_HOLD_SECONDS = 60
_PAGE = 1_000
# Where an earlier layout noted, by reader of `forgets`, what it had applied.
_FORGETS = "stream:forgets"

# KEYS history before, seen before, history, seen, users, then pairs of a state's name before and after.
# ARGV: epoch before, epoch, user id, home partition, now (Unix seconds), seconds to live where nothing limits them.
_MOVE = """
local position = redis.call('HGET', KEYS[1], 'position')
if not position then return 0 end
local bar = string.find(position, '|', 1, true)
if string.sub(position, 1, bar - 1) ~= ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[2])
  return 0
end
local rest = string.sub(position, bar)
redis.call('HSET', KEYS[1], 'position', ARGV[2] .. rest)
local ttl = redis.call('TTL', KEYS[1])
if ttl < 0 then ttl = tonumber(ARGV[6]) end
redis.call('RENAME', KEYS[1], KEYS[3])
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('RENAME', KEYS[2], KEYS[4]) end
for i = 6, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 1 then redis.call('RENAME', KEYS[i], KEYS[i + 1]) end
end
if redis.call('HGET', KEYS[5], '') ~= ARGV[2] then
  redis.call('DEL', KEYS[5])
  redis.call('HSET', KEYS[5], '', ARGV[2])
end
local offset = string.match(',' .. string.match(rest, '|([^|]*)'), ',' .. ARGV[4] .. ':(%d+)') or '-1'
redis.call('HSET', KEYS[5], ARGV[3], offset .. ':' .. (tonumber(ARGV[5]) + ttl))
return 1
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upgraded:
    """epoch: the store's from now on. users: how many were moved; 0 and the same epoch where nothing was to do."""

    epoch: str
    users: int


def upgrade_store(
    url: str, *, num_partitions: int, ttl_seconds: int, now_s: int, progress: Callable[[int], None] = lambda users: None
) -> Upgraded:
    """Move every key. num_partitions: of `interactions`. Nothing else may write meanwhile: an encoder process of the
    earlier version is asked to wait.

    Raises: PreconditionFailed when the store was never filled.
    """
    with redis.Redis.from_url(url) as client:
        before = (cast(bytes | None, client.get(layout.EPOCH_KEY)) or b"").decode()
        if not before:
            raise PreconditionFailed("the state store is empty: there is nothing to upgrade")
        if "-" in before:
            return Upgraded(epoch=before, users=0)
        epoch = f"{before}-{num_partitions}"
        models = sorted(model.decode() for model in cast(set[bytes], client.smembers(layout.MODELS_KEY)))
        move = client.register_script(_MOVE)
        moved = 0
        for users in _pages(client):
            client.set(layout.HOLD_KEY, "1", ex=_HOLD_SECONDS)
            pipeline = client.pipeline(transaction=False)
            for user_id in users:
                home, tag = layout.home_of(user_id, epoch), _tag(user_id)
                keys = [f"{tag}:history", f"{tag}:seen", layout.history_key(home), layout.seen_key(home)]
                keys.append(layout.users_key(home.partition))
                for model in models:
                    keys += [f"{tag}:state:{model}", layout.state_key(home, model)]
                move(keys, [before, epoch, user_id, home.partition, now_s, ttl_seconds], client=pipeline)
            moved += sum(pipeline.execute())
            progress(moved)
        for partition in range(num_partitions):
            if client.hget(f"stream:{partition}:progress", "epoch") == before.encode():
                client.hset(f"stream:{partition}:progress", "epoch", epoch)
                client.rename(f"stream:{partition}:progress", layout.progress_key(partition))
        applied = cast(dict[bytes, bytes], client.hgetall(_FORGETS))
        for reader, text in applied.items():
            of_epoch, _, offset = text.decode().partition("|")
            if of_epoch == before:
                for partition in range(num_partitions):
                    client.hset(
                        layout.forgets_key(partition), cast(Any, reader), layout.forgets_text(epoch, int(offset))
                    )
        client.delete(_FORGETS)
        client.set(layout.EPOCH_KEY, epoch)
        client.delete(layout.HOLD_KEY)
        return Upgraded(epoch=epoch, users=moved)


def _tag(user_id: str) -> str:
    for plain, escaped in (("%", "%25"), ("{", "%7B"), ("}", "%7D")):
        user_id = user_id.replace(plain, escaped)
    return "u:{" + user_id + "}"


def _pages(client: redis.Redis) -> Iterator[list[str]]:
    """Ids of users with keys of the earlier layout, some at a time."""
    page: list[str] = []
    for key in client.scan_iter("u:{*}:history", count=_PAGE):
        user_id = key.decode().removeprefix("u:{").removesuffix("}:history")
        for plain, escaped in (("}", "%7D"), ("{", "%7B"), ("%", "%25")):
            user_id = user_id.replace(escaped, plain)
        page.append(user_id)
        if len(page) == _PAGE:
            yield page
            page = []
    if page:
        yield page
