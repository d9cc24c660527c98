"""Redis clients for a server's or a cluster's URL (`redis+cluster://HOST:PORT,HOST:PORT`), which connect on first use.

redis-py's cluster pipelines ask the server for the keys of each script call. They retry commands one by one, which
takes minutes if a node is unavailable. These clients send each node its commands once; after a failure they refresh the
nodes and raise.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.commands.core import Script
from redis.exceptions import ClusterError, MovedError, RedisClusterException, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from services.platform.transport import cluster_nodes, node_url

# Exceptions that a client may raise.
REDIS_ERRORS = (RedisError, RedisClusterException, OSError, TimeoutError)
_SUMMED = ("evicted_keys", "expired_keys")
# One retry, because Redis may have closed an idle connection. Timeouts are retried only in a cluster, whose topology
# may have changed.
_RETRIES = 1


def open_client(url: str, *, timeout_s: float) -> redis.Redis:
    if nodes := cluster_nodes(url):
        return cast(redis.Redis, _Cluster(nodes, _node_options(parse_url(node_url(url)), timeout_s)))
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), _RETRIES, supported_errors=(RedisConnectionError,)),
    )


def open_async_client(url: str, *, timeout_s: float, max_connections: int = 64) -> redis.asyncio.Redis:
    """Return an asyncio client. max_connections: most connections to one node."""
    if nodes := cluster_nodes(url):
        options = _node_options(parse_url(node_url(url)), timeout_s)
        cluster = redis.asyncio.RedisCluster(
            startup_nodes=[AsyncClusterNode(host, port) for host, port in nodes],
            retry=AsyncRetry(NoBackoff(), _RETRIES),
            max_connections=max_connections,
            **options,
        )
        return cast(redis.asyncio.Redis, _AsyncCluster(cluster))
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        max_connections=max_connections,
        retry=AsyncRetry(NoBackoff(), _RETRIES, supported_errors=(RedisConnectionError,)),
    )


def advice_on(exc: Exception) -> str:
    """Return how to correct FRESHET_REDIS_URL; "" if it is not the cause."""
    if isinstance(exc, MovedError):
        return "FRESHET_REDIS_URL is redis:// of a cluster's node; allowed: redis+cluster://HOST:PORT,HOST:PORT"
    if isinstance(exc, RedisClusterException) and "Cluster mode is not enabled" in str(exc):
        return (
            "FRESHET_REDIS_URL is redis+cluster:// of a server without a cluster (allowed: "
            "redis://HOST:PORT), or its user may not run CLUSTER SLOTS"
        )
    return ""


def _node_options(found: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    given = {name: value for name, value in found.items() if name not in ("host", "port", "db", "connection_class")}
    tls = {"ssl": True} if "connection_class" in found else {}
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, **tls, **given}


class _Cluster:
    """Constructs redis-py's cluster client on first use, because its constructor connects."""

    def __init__(self, nodes: list[tuple[str, int]], options: Mapping[str, Any]) -> None:
        self._nodes, self._options = nodes, options
        self._lock = threading.Lock()
        self._opened: redis.RedisCluster | None = None

    def client(self) -> redis.RedisCluster:
        with self._lock:
            if self._opened is None:
                nodes: list[Any] = [cast(Any, ClusterNode)(*address) for address in self._nodes]
                self._opened = redis.RedisCluster(
                    startup_nodes=nodes, retry=Retry(NoBackoff(), _RETRIES), **self._options
                )
            return self._opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client(), name)

    def __enter__(self) -> "_Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register_script(self, script: str) -> Script:
        return Script(cast(redis.Redis, self), script.encode())

    def pipeline(self, *, transaction: bool) -> "_Pipeline":
        assert not transaction, "a cluster has none over several nodes"
        return _Pipeline(self)

    def info(self, section: str = "everything") -> dict[str, Any]:
        """Return the info of the fullest master, because a full master rejects writes.

        The counts of removed keys are summed over all masters.
        """
        masters: Any = self.client().info(section, target_nodes=redis.RedisCluster.PRIMARIES)
        found: list[dict[str, Any]] = list(masters.values())
        fullest = max(found, key=lambda one: one.get("used_memory", 0) / (one.get("maxmemory") or float("inf")))
        return fullest | {name: sum(one[name] for one in found) for name in _SUMMED if name in fullest}

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()


class _Pipeline:
    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster
        self._queue: list[tuple[str, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._queue.append((name, arguments))

    def execute(self) -> list[Any]:
        queue, self._queue = self._queue, []
        cluster: Any = self._cluster.client()
        try:
            pipelines: dict[str, Any] = {}
            places: dict[str, list[int]] = {}
            for place, (name, arguments) in enumerate(queue):
                key = arguments[2] if name in ("eval", "evalsha") else arguments[0]
                node = cluster.get_node_from_key(key)
                if node.name not in pipelines:
                    pipelines[node.name] = cluster.get_redis_connection(node).pipeline(transaction=False)
                getattr(pipelines[node.name], name)(*arguments)
                places.setdefault(node.name, []).append(place)
            replies: dict[int, Any] = {}
            for node_name, pipeline in pipelines.items():
                replies.update(zip(places[node_name], pipeline.execute(), strict=True))
        except (RedisConnectionError, redis.TimeoutError, ClusterError, MovedError, RedisClusterException) as exc:
            cluster.nodes_manager.initialize()
            raise ClusterError(f"{type(exc).__name__}: {exc}") from exc
        return [replies[place] for place in range(len(queue))]


class _AsyncCluster:
    """redis-py's cluster client, but its pipeline sends commands concurrently and its ping asks one node."""

    def __init__(self, cluster: redis.asyncio.RedisCluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def pipeline(self, *, transaction: bool) -> "_AtOnce":
        assert not transaction, "a cluster has none over several nodes"
        return _AtOnce(self._cluster)

    async def ping(self) -> bool:
        return bool(await self._cluster.execute_command("PING"))

    async def aclose(self) -> None:
        await self._cluster.aclose()
        # redis-py's `aclose` closes nothing during a refresh.
        for kind in ("nodes_cache", "startup_nodes"):
            await self._cluster.nodes_manager.aclose(kind)


class _AtOnce:
    def __init__(self, cluster: redis.asyncio.RedisCluster) -> None:
        self._cluster = cluster
        self._queue: list[Callable[[], Awaitable[Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._queue.append(lambda: getattr(self._cluster, name)(*arguments))

    async def execute(self) -> list[Any]:
        queue, self._queue = self._queue, []
        await self._cluster.initialize()
        replies = await asyncio.gather(*(command() for command in queue), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies
