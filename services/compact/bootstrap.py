"""Puts three processes together in one: the gateway calls candidates and the reranker as objects."""

from services.candidates.bootstrap import opened
from services.candidates.config import CandidatesSettings
from services.common.config import load_settings
from services.common.rpc_server import HealthState
from services.common.tracing import configure_tracing
from services.compact.in_process import InProcess
from services.gateway import bootstrap as gateway
from services.gateway.config import GatewaySettings
from services.reranker.bootstrap import VERSIONS_KEPT, make_rerank
from services.reranker.config import RerankerSettings
from services.reranker.metrics import RerankerMetrics
from services.reranker.server import RerankerServicer


async def run(settings: GatewaySettings) -> None:
    """Serve until a signal; items are held once, for both stages. Raises: as the three's own `run`."""
    tracing, health = configure_tracing("gateway", settings.otlp_endpoint), HealthState()
    ranking = load_settings(RerankerSettings)
    async with opened(load_settings(CandidatesSettings), health, tracing, versions_kept=VERSIONS_KEPT) as (
        candidates,
        live,
    ):
        rerank = make_rerank(ranking, live.catalogue, RerankerMetrics())
        reranker = RerankerServicer(rerank, check_ready=candidates.check_ready)
        peers = {"candidates": InProcess(candidates), "reranker": InProcess(reranker)}
        try:
            await gateway.run(settings, tracing=tracing, health=health, in_process=peers)
        finally:
            await rerank.close()
