"""Every handler of one version set, made from its ports."""

from collections.abc import Callable, Sequence
from random import Random

from services.gateway.dependencies import AcknowledgedLag, LoopStalls
from services.gateway.describe.items import DescribeCatalogue, GetItem, ListItems
from services.gateway.describe.users import GetUser, ShownTo, TailInteractions
from services.gateway.domain import ServedModel
from services.gateway.health import DeadLetters, GetFreshness, GetHealth
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Ports, Refreshers
from services.gateway.recommend.explain import Explain
from services.gateway.recommend.exposures import Exposures
from services.gateway.recommend.new_items import NewItems
from services.gateway.recommend.pages import PageTokens
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.rankings import Rankings
from services.gateway.recommend.recommend import Recommend, RequestStates
from services.gateway.recommend.similar import Similar
from services.gateway.recommend.standing_rules import LiveRules
from services.gateway.recommend.token_waits import TokenWaits
from services.gateway.search import Search, TextRetrieval
from services.gateway.stages import Limits, Preferences, Stages
from services.gateway.write.forget import ForgetUser
from services.gateway.write.items import PutItems
from services.gateway.write.record import RecordImpressions, RecordInteractions


class Handlers:
    """The handlers of one version set; each is called concurrently."""

    def __init__(
        self,
        ports: Ports,
        *,
        model: ServedModel,
        items: PopularItems,
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
        other_items: Callable[[], Sequence[PopularItems]] = tuple,
    ) -> None:
        """stalls: this event loop's stalls. others, other_items: return other version sets' refreshers and items."""
        rules = rules or LiveRules(model.kinds)
        stages = Stages(ports, limits, model, stalls=stalls, on_nothing=metrics.component_failed)
        text = TextRetrieval(ports.sources, limits)
        self.recommend = Recommend(
            stages=stages,
            states=RequestStates(
                stages=stages,
                tokens=TokenWaits(stages.read_watermark, poll_s=limits.token_poll_s),
                lag=lag,
                preferences=preferences,
            ),
            rankings=Rankings(stages=stages, text=text, popular=items, cold_items=preferences.cold_items),
            new_items=NewItems(stages=stages, popular=items, rng=rng or Random(), preferences=preferences),
            rules=rules,
            exposures=exposures,
            pages=pages,
            metrics=metrics,
        )
        self.search = Search(stages=stages, text=text, metrics=metrics, items=items, exposures=exposures)
        self.similar = Similar(stages=stages, items=items, exposures=exposures)
        self.explain = Explain(stages=stages, items=items, rules=rules)
        self.record = RecordInteractions(
            stages=stages, lag=lag, metrics=metrics, exposures=exposures, preferences=preferences
        )
        self.record_impressions = RecordImpressions(exposures=exposures, record=self.record, schema=model.schema)
        self.put_items = PutItems(log=ports.items, kinds=model.kinds, items=items, others=other_items, limits=limits)
        self.forget_user = ForgetUser(ports=ports, others=others, append_timeout_s=limits.append_timeout_s)
        self.describe_catalogue = DescribeCatalogue(items=items, model=model)
        self.get_item = GetItem(items=items, refreshers=ports.refreshers, model=model)
        self.list_items = ListItems(items=items, model=model)
        self.get_user = GetUser(states=ports.states, items=items, model=model)
        self.shown_to = ShownTo(log=ports.shown, time_of=exposures.time_of, items=items)
        self.tail = TailInteractions(ends=ports.ends, items=items)
        self.get_freshness = GetFreshness(ports=ports, model_version=model.version)
        self.get_health = GetHealth(ports, self.get_freshness, metrics.minutes)
        self.dead_letters = DeadLetters(ports.letters)
