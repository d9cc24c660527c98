"""The leases port over Redis. A script assigns the partitions; each member runs it a few times a second.

A member that dies stops renewing, so its partitions become free when the lease ends. A member whose working loop hangs
stops renewing after a minute. A new member gets its share when others release their surplus. While Redis is
unavailable, each member retains its partitions. A paused process does not know that its lease ended, so writes have to
tolerate two members on one partition.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import structlog

from services.platform.redis_clients import REDIS_ERRORS, open_client
from services.platform.stream.follower import STUCK_S
from services.platform.stream.ports import Holding
from services.user_state.values import redis_errors

log = structlog.get_logger()

RENEWALS_PER_LEASE = 5
# A released partition is acquired within this time.
_MAX_PAUSE_S = 0.2

# KEYS: members, then each partition's lease and term. ARGV: owner, lease in ms.
# Returns: the fair share, then (index, term) of each partition that the owner leases.
_TICK = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- A full Redis refuses a script whose first write needs room; this one needs none, and leases take next to none.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], 60000)
local partitions = (#KEYS - 1) / 2
local fair = math.ceil(partitions / redis.call('ZCARD', KEYS[1]))
local held, free, answer = 0, {}, {fair}
for place = 0, partitions - 1 do
  local lease = KEYS[2 + 2 * place]
  local owner = redis.call('GET', lease)
  if owner == ARGV[1] then
    redis.call('PEXPIRE', lease, ARGV[2])
    held = held + 1
    answer[#answer + 1] = place
    answer[#answer + 1] = tonumber(redis.call('GET', KEYS[3 + 2 * place]) or 0)
  elseif not owner then
    free[#free + 1] = place
  end
end
for _, place in ipairs(free) do
  if held >= fair then break end
  redis.call('SET', KEYS[2 + 2 * place], ARGV[1], 'PX', ARGV[2])
  held = held + 1
  answer[#answer + 1] = place
  answer[#answer + 1] = redis.call('INCR', KEYS[3 + 2 * place])
end
return answer
"""

# KEYS: members, leases. ARGV: owner, "1" to remove the owner from the members too.
_RELEASE = """
for place = 2, #KEYS do
  if redis.call('GET', KEYS[place]) == ARGV[1] then redis.call('DEL', KEYS[place]) end
end
if ARGV[2] == '1' then redis.call('ZREM', KEYS[1], ARGV[1]) end
return 1
"""


class RedisLeases:
    """One group's leases on partitions, renewed by a thread."""

    def __init__(
        self, url: str, *, process: str, group: str, lease_ms: int, timeout_s: float = 1.0, stuck_s: float = STUCK_S
    ) -> None:
        """process, group: prefix of the keys. stuck_s: renewals stop if `holding` is not called for this long."""
        self._redis = open_client(url, timeout_s=timeout_s)
        # A script's keys must be in one cluster slot: the hash tag puts a group's keys there.
        self._prefix = f"{process}:{{{group}}}:"
        self._lease_ms, self._stuck_s, self._asked_s = lease_ms, stuck_s, time.monotonic()
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._tick = self._redis.register_script(_TICK)
        self._release = self._redis.register_script(_RELEASE)
        self._partitions: list[int] = []
        self._holding = Holding({})
        # Number of releases begun plus ended, which is odd while one is in flight.
        self._releases = 0
        # Guards the two fields above. Not locked during Redis calls, because the working loop locks it each turn.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._complaint = ""

    def start(self, partitions: Sequence[int]) -> None:
        if self._thread is None:
            self._partitions = list(partitions)
            with redis_errors():
                self._renew()
            self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
            self._thread.start()

    def holding(self) -> Holding:
        self._asked_s = time.monotonic()
        with self._lock:
            return self._holding

    def release(self, partitions: Collection[int]) -> None:
        with self._lock:
            terms = {p: term for p, term in self._holding.terms.items() if p not in partitions}
            self._holding = Holding(terms, 0)
            self._releases += 1
        try:
            self._release(keys=self._lease_keys(partitions), args=[self._owner, "0"])
        except REDIS_ERRORS as exc:
            log.warning("lease_not_released", reason=str(exc))
        finally:
            with self._lock:
                self._releases += 1

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            # An odd number of releases makes `_renew` ignore later answers.
            self._holding, self._releases = Holding({}), self._releases | 1
        if self._thread is not None:
            self._thread.join(2.0)
        try:
            self._release(keys=self._lease_keys(self._partitions), args=[self._owner, "1"])
        except REDIS_ERRORS as exc:
            log.info("leases_left_to_expire", reason=str(exc))
        self._redis.close()

    def _run(self) -> None:
        while not self._stop.wait(min(_MAX_PAUSE_S, self._lease_ms / 1000 / RENEWALS_PER_LEASE)):
            if time.monotonic() - self._asked_s > self._stuck_s:
                continue
            try:
                self._renew()
                if self._complaint:
                    log.info("leases_recovered")
                self._complaint = ""
            except REDIS_ERRORS as exc:
                if type(exc).__name__ != self._complaint:
                    self._complaint = type(exc).__name__
                    log.warning("leases_wait", reason=str(exc))

    def _renew(self) -> None:
        keys = [f"{self._prefix}members"]
        for partition in self._partitions:
            keys += (f"{self._prefix}lease:{partition}", f"{self._prefix}term:{partition}")
        with self._lock:
            releases = self._releases
        answer: Any = self._tick(keys=keys, args=[self._owner, self._lease_ms])
        fair, pairs = int(answer[0]), [int(number) for number in answer[1:]]
        terms = {self._partitions[place]: term for place, term in zip(pairs[::2], pairs[1::2], strict=True)}
        with self._lock:
            # An answer that overlaps a release may contain a released partition.
            if releases == self._releases and not releases % 2:
                self._holding = Holding(terms, max(0, len(terms) - fair))

    def _lease_keys(self, partitions: Collection[int]) -> list[str]:
        return [f"{self._prefix}members", *(f"{self._prefix}lease:{partition}" for partition in partitions)]
