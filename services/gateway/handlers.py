"""Every handler of one version set, made from its ports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from services.gateway.dependencies import AcknowledgedLag, LoopStalls
from services.gateway.describe.catalogue import DescribeCatalogue
from services.gateway.describe.items import GetItem, ListItems
from services.gateway.describe.shown import ShownTo
from services.gateway.describe.tail import TailInteractions
from services.gateway.describe.user import GetUser
from services.gateway.domain import ServedModel
from services.gateway.get_freshness import GetFreshness
from services.gateway.health.dead_letters import DeadLetters
from services.gateway.health.get_health import GetHealth
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Ports, Refreshers
from services.gateway.recommend.catalogue import DescribedItems
from services.gateway.recommend.explain import Explain
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.new_items import NewItems
from services.gateway.recommend.pages import PageTokens
from services.gateway.recommend.rankings import Rankings
from services.gateway.recommend.recommend import Recommend, RequestStates
from services.gateway.recommend.similar import Similar
from services.gateway.recommend.standing_rules import LiveRules
from services.gateway.recommend.token_waits import TokenWaits
from services.gateway.search.search import Search, TextRetrieval
from services.gateway.stages import Limits, Preferences, Stages
from services.gateway.write.forget import ForgetUser
from services.gateway.write.items import PutItems
from services.gateway.write.record import RecordImpressions, RecordInteractions


@dataclass(frozen=True, kw_only=True, slots=True)
class Handlers:
    """The handlers of one version set; each is called concurrently."""

    recommend: Recommend
    search: Search
    similar: Similar
    record: RecordInteractions
    record_impressions: RecordImpressions
    explain: Explain
    get_freshness: GetFreshness
    put_items: PutItems
    forget_user: ForgetUser
    describe_catalogue: DescribeCatalogue
    get_item: GetItem
    list_items: ListItems
    get_user: GetUser
    get_health: GetHealth
    dead_letters: DeadLetters
    shown_to: ShownTo
    tail: TailInteractions


def make_handlers(
    ports: Ports,
    *,
    model: ServedModel,
    described: DescribedItems,
    metrics: GatewayMetrics,
    exposures: Exposures,
    pages: PageTokens,
    lag: AcknowledgedLag,
    limits: Limits,
    preferences: Preferences,
    stalls: LoopStalls | None = None,
    rng: Random | None = None,
    rules: LiveRules | None = None,
    others: Callable[[], Sequence[Refreshers]] = tuple,
    other_items: Callable[[], Sequence[DescribedItems]] = tuple,
) -> Handlers:
    """Make the handlers. stalls: those of this event loop. others, other_items: return the other version sets' ones."""
    titles, popular, rules = described.titles, described.popular, rules or LiveRules(model.kinds)
    stages = Stages(ports, limits, model, stalls=stalls, on_nothing=metrics.component_failed)
    text, get_freshness = TextRetrieval(ports.sources, limits), GetFreshness(ports=ports, model_version=model.version)
    record = RecordInteractions(
        ports=ports,
        lag=lag,
        metrics=metrics,
        exposures=exposures,
        schema=model.schema,
        limits=limits,
        preferences=preferences,
    )
    recommend = Recommend(
        stages=stages,
        states=RequestStates(
            stages=stages,
            tokens=TokenWaits(stages.read_watermark, poll_s=limits.token_poll_s),
            lag=lag,
            stream=ports.stream,
            schema=model.schema,
            limits=limits,
            preferences=preferences,
        ),
        rankings=Rankings(
            stages=stages, text=text, popular=popular, limits=limits, tau=model.tau, cold_items=preferences.cold_items
        ),
        new_items=NewItems(
            stages=stages,
            popular=popular,
            rng=rng or Random(),
            share=preferences.new_item_share,
            age_s=preferences.new_item_age_s,
        ),
        stream=ports.stream,
        model=model,
        rules=rules,
        exposures=exposures,
        pages=pages,
        metrics=metrics,
        limits=limits,
    )
    return Handlers(
        recommend=recommend,
        search=Search(
            stages=stages, text=text, metrics=metrics, titles=titles, model=model, exposures=exposures, limits=limits
        ),
        similar=Similar(ports=ports, stages=stages, titles=titles, model=model, exposures=exposures, limits=limits),
        record=record,
        record_impressions=RecordImpressions(exposures=exposures, record=record, schema=model.schema),
        explain=Explain(ports=ports, titles=titles, model=model, limits=limits, rules=rules),
        get_freshness=get_freshness,
        put_items=PutItems(log=ports.items, kinds=model.kinds, described=described, others=other_items, limits=limits),
        forget_user=ForgetUser(ports=ports, others=others, append_timeout_s=limits.append_timeout_s),
        describe_catalogue=DescribeCatalogue(titles=titles, popular=popular, model=model),
        get_item=GetItem(described=described, refreshers=ports.refreshers, model=model),
        list_items=ListItems(described=described, model=model),
        get_user=GetUser(states=ports.states, titles=titles, model=model),
        get_health=GetHealth(ports, get_freshness, metrics.minutes),
        dead_letters=DeadLetters(ports.letters),
        shown_to=ShownTo(log=ports.shown, time_of=exposures.time_of, titles=titles),
        tail=TailInteractions(ends=ports.ends, titles=titles),
    )
