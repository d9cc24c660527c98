"""Three processes in one: the gateway calls candidates and reranker as objects."""

import asyncio
import time
from functools import partial
from typing import Any

import structlog

from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.items.live_catalogue import MAX_VERSIONS
from services.candidates.bootstrap import opened
from services.candidates.config import CandidatesSettings
from services.compact.config import CompactSettings
from services.compact.workers import may_listen
from services.gateway import bootstrap as gateway
from services.platform import errors, request_context
from services.platform.config import ConfigError, load_settings
from services.platform.process import configure_tracing
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import HealthState
from services.reranker.handlers import Rerank, RerankerMetrics
from services.reranker.server import RerankerServicer

log = structlog.get_logger()


class InProcess:
    """Implements the gateway's `Peer`: calls a servicer directly, with gRPC's messages and errors. servicer: its
    methods get None as context.
    """

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    async def call(self, stub: Any, method: str, request: Any, *, timeout_s: float, peer: str) -> Any:
        """Call the servicer's method as `rpc_client.call` would; `stub` is ignored."""
        timeout = request_context.bounded_timeout(timeout_s)
        if timeout <= 0:
            raise errors.DeadlineExceeded(f"{peer}: no time left to call it")
        deadline = request_context.deadline.set(time.monotonic() + timeout)
        try:
            async with asyncio.timeout(timeout):
                return await getattr(self._servicer, method)(request, None)
        except TimeoutError as exc:
            raise errors.DeadlineExceeded(f"{peer}: no answer within {1000 * timeout:.0f} ms") from exc
        except errors.FreshetError as exc:
            raise rpc_client.translate_status(exc.status.value[0], exc.message, peer) from exc
        except Exception as exc:
            log.error("call_failed", peer=peer, method=method, exc_info=exc)
            raise errors.DependencyUnavailable(f"{peer}: internal error (INTERNAL)", retriable=False) from exc
        finally:
            request_context.deadline.reset(deadline)

    async def close(self) -> None:
        """Do nothing: the servicer's creator closes its resources."""


class LaterWorkersCandidates(CandidatesSettings):
    """Settings of all workers but the first."""

    @property
    def does_common_work(self) -> bool:
        return False


async def run(settings: CompactSettings) -> None:
    """Serve until a signal. Raises: errors of the three processes' `run`; ConfigError for a shard."""
    tracing, health = configure_tracing("gateway", settings.otlp_endpoint), HealthState(check=changed_in_place)
    followed = load_settings(LaterWorkersCandidates if settings.worker else CandidatesSettings)
    if not followed.shard.is_all:
        raise ConfigError(
            f"FRESHET_CANDIDATES_SHARD='{followed.shard}'; allowed in a compact process: 0/1, the whole catalogue"
        )
    async with opened(followed, health, tracing, max_versions=MAX_VERSIONS) as (candidates, live):
        rerank = Rerank(catalogue=live.catalogue, metrics=RerankerMetrics())
        reranker = RerankerServicer(rerank, check_ready=candidates.check_ready)
        peers = {"candidates": InProcess(candidates), "reranker": InProcess(reranker)}
        try:
            await gateway.run(
                settings,
                tracing=tracing,
                health=health,
                in_process=peers,
                before_listening=partial(may_listen, health) if settings.shares_port else None,
            )
        finally:
            await rerank.close()
