"""Three processes in one: the gateway calls candidates and reranker as objects."""

from functools import partial

from services.algorithms.bundles.tensor_file import changed_in_place
from services.algorithms.items.live_catalogue import MAX_VERSIONS
from services.candidates.bootstrap import opened
from services.candidates.config import CandidatesSettings
from services.compact.config import CompactSettings
from services.compact.in_process import InProcess
from services.compact.workers import may_listen
from services.gateway import bootstrap as gateway
from services.platform.config import ConfigError, load_settings
from services.platform.process import configure_tracing
from services.platform.rpc.server import HealthState
from services.reranker.handlers import Rerank, RerankerMetrics
from services.reranker.server import RerankerServicer


class LaterWorkersCandidates(CandidatesSettings):
    """Settings of all workers but the first."""

    @property
    def does_common_work(self) -> bool:
        return False


async def run(settings: CompactSettings) -> None:
    """Serve until a signal. Raises: as the three processes' `run`; ConfigError for a shard."""
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
