"""Rules of a ranking, through real candidates and the real reranker: every score against a loop over all items."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import yaml
from freshet.v1 import common_pb2, gateway_pb2
from gateway_scene import ATTRIBUTES, STORED, Scene
from prometheus_client import CollectorRegistry
from retrieval_scene import CATEGORIES, half, make_bundle, make_queries, state_fields
from test_server import gateway

from services.algorithms.indexes.protocol import ESTIMATE, EXACT
from services.algorithms.items.live_catalogue import MAX_VERSIONS
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.candidates import bootstrap as candidates
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import CandidatesServicer
from services.compact.bootstrap import InProcess
from services.contracts.topics.rules import StandingRules
from services.contracts.wire import PackedQueryState, rules_of
from services.contracts.yaml_files import parse_rules, rules_from, rules_text
from services.gateway.adapters.processes import RemoteCandidates, RemoteReranker
from services.gateway.domain import Degradation, ExplainQuery, Pool, RecommendQuery
from services.gateway.recommend.rankings import with_own_pools
from services.gateway.recommend.standing_rules import standing_rules
from services.gateway.stages import Limits
from services.platform.config import ConfigError
from services.platform.errors import DependencyUnavailable
from services.reranker import bootstrap as reranker
from services.reranker.handlers import RerankerMetrics
from services.reranker.server import RerankerServicer

X = 60
ALL = ItemFilter(exclude_seen=False)


class Real:
    """The gateway's handler over real candidates and reranker, and the exact scores of its one user."""

    def __init__(self, scene: Scene, exact: np.ndarray) -> None:
        self.scene, self.exact = scene, exact

    def names(self, rule: Rule, row: int) -> bool:
        which = rule.which
        return (not which.allow_item_ids or f"item-{row}" in which.allow_item_ids) and (
            not which.allow_categories or CATEGORIES[row % 4] in which.allow_categories
        )

    def final(self, rules: list[Rule], row: int) -> float:
        return float(self.exact[row]) + sum(one.boost - one.bury for one in rules if self.names(one, row))

    async def ask(self, rules: list[Rule], k: int = 5, **fields: Any) -> Any:
        query = RecommendQuery(user_id="ann", k=k, rules=tuple(rules), filter=fields.pop("filter", ALL), **fields)
        return await self.scene.recommend(query)


@pytest_asyncio.fixture
async def real(tmp_path: Path) -> AsyncIterator[Real]:
    bundle = make_bundle(tmp_path / "bundle", count=X)
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=tmp_path / "bundle", audit_share=0, drain_seconds=0)
    metrics = CandidatesMetrics(CollectorRegistry())
    live = candidates.make_live(settings, candidates.load_catalogue(settings), metrics, max_versions=MAX_VERSIONS)
    rerank = reranker.Rerank(catalogue=live.catalogue, metrics=RerankerMetrics(CollectorRegistry()))
    queries = half(make_queries(np.random.default_rng(1), 1, 4, 2, 8))
    scene = Scene(
        candidates=RemoteCandidates(InProcess(CandidatesServicer(live.search))),  # type: ignore[arg-type]
        reranker=RemoteReranker(InProcess(RerankerServicer(rerank))),  # type: ignore[arg-type]
        # A pool that leaves out most of the catalogue: what rules lift has to come from their own searches. A busy
        # machine's answer is late, and late is popular items.
        limits=Limits(pool_size=10, budget_s=60, state_timeout_s=10, stage_timeout_s=10),
    )
    state = PackedQueryState(**state_fields(queries, bundle.model_version))
    scene.states.states["ann"] = replace(STORED, query_state=state)
    scene.states.seen["ann"] = []
    yield Real(scene, mol_scores_reference(queries, bundle.item_states, bundle.pair_gate).numpy()[0])
    await live.search.close()
    await rerank.close()


def some_rule(rng: np.random.Generator, number: int) -> Rule:
    if rng.random() < 0.5:
        which = replace(ALL, allow_categories=tuple(rng.choice(CATEGORIES, rng.integers(1, 3), replace=False).tolist()))
    else:
        which = replace(ALL, allow_item_ids=tuple(f"item-{row}" for row in rng.choice(X, 6, replace=False).tolist()))
    size = float(rng.choice([0.01, 0.1, 1.0]))
    effect = {"boost": size} if rng.random() < 0.6 else {"bury": size}
    return Rule(name=f"r{number}", which=which, **effect)


@pytest.mark.parametrize("seed", range(16))
async def test_boosts_and_buries_rank_as_a_loop_over_all_items_or_say_how_far_off(real: Real, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rules = [some_rule(rng, number) for number in range(rng.integers(1, 4))]
    answer = await real.ask(rules)
    best = sorted(range(X), key=lambda row: -real.final(rules, row))[:5]
    found = [int(item.item_id.removeprefix("item-")) for item in answer.items]
    assert [item.score for item in answer.items] == pytest.approx([real.final(rules, row) for row in found], abs=1e-6)
    for item, row in zip(answer.items, found, strict=True):
        assert list(item.rules) == [rule.name for rule in rules if real.names(rule, row)]
    assert answer.certificate != ESTIMATE
    if answer.certificate == EXACT:
        assert found == best
    assert real.final(rules, best[-1]) <= answer.items[-1].score + answer.certificate.gap + 1e-6


@pytest.mark.parametrize("seed", range(4))
async def test_explain_names_the_rules_that_name_the_item_and_what_they_add(real: Real, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rules = [some_rule(rng, number) for number in range(3)]
    everything = replace(ALL, allow_categories=tuple(CATEGORIES))
    rules += [Rule(name="first", which=everything, pin=2), Rule(name="few", which=everything, cap=1)]
    for row in range(0, X, 7):
        query = ExplainQuery(user_id="ann", item_id=f"item-{row}", rules=tuple(rules))
        answer = await real.scene.explain(query)
        assert list(answer.rules) == [rule for rule in rules if real.names(rule, row)]
        assert answer.score == pytest.approx(real.exact[row], abs=1e-6)
        assert answer.score_with_rules == pytest.approx(real.final(rules, row), abs=1e-6)


async def test_pins_and_caps_hold_in_an_answer_of_the_best(real: Real) -> None:
    worst = np.argsort(real.exact)[:2].tolist()
    pin = Rule(name="first", which=replace(ALL, allow_item_ids=tuple(f"item-{row}" for row in worst)), pin=2)
    cap = Rule(name="few", which=replace(ALL, allow_categories=(CATEGORIES[0], CATEGORIES[1])), cap=1)
    answer = await real.ask([pin, cap], k=6)
    found = [int(item.item_id.removeprefix("item-")) for item in answer.items]
    assert found[1] == max(worst, key=lambda row: real.exact[row])
    assert answer.items[1].rules == ("first",)
    capped = [row for row in found if row % 4 in (0, 1)]
    assert len(capped) == 1
    rest = [row for row in np.argsort(-real.exact).tolist() if row % 4 not in (0, 1) and row != found[1]]
    assert [row for row in found if row not in (found[1], *capped)] == rest[
        : 5 - len([r for r in capped if r != found[1]])
    ]


async def test_standing_rules_hold_beside_a_requests(scene: Scene) -> None:
    standing = Rule(name="house", which=ItemFilter(allow_categories=("x",)), boost=0.5)
    own = Rule(name="own", which=ItemFilter(allow_categories=("y",)), bury=0.5)
    scene.recommend.rules.apply(StandingRules(revision=1, rules=(standing,)))
    await scene.recommend(RecommendQuery(user_id="ann", k=2, rules=(own,)))
    assert list(scene.reranker.rules[-1]) == [standing, own]
    # Every page of a list that is kept has them.
    await scene.recommend(RecommendQuery(user_id="ann", k=2))
    assert list(scene.reranker.rules[-1]) == [standing]


async def test_explain_says_standing_rules_first_on_the_wire_too(scene: Scene) -> None:
    standing = Rule(name="house", which=ItemFilter(allow_item_ids=("b",)), bury=0.5)
    scene.explain.rules.apply(StandingRules(revision=1, rules=(standing,)))
    own = [common_pb2.Rule(name="own", item_ids=["b"], pin=3), common_pb2.Rule(name="other", item_ids=["c"], boost=1)]
    async with gateway(scene) as stub:
        answer = await stub.Explain(gateway_pb2.ExplainRequest(user_id="ann", item_id="b", rules=own), timeout=5)
    assert [(rule.name, rule.adds, rule.pin, rule.cap) for rule in answer.rules] == [
        ("house", -0.5, 0, 0),
        ("own", 0, 3, 0),
    ]
    assert answer.score_with_rules == pytest.approx(answer.score - 0.5)


async def test_a_search_that_fails_leaves_an_estimate_and_no_reranker_says_so(scene: Scene) -> None:
    scene.reranker.failure = DependencyUnavailable("away")
    rule = Rule(name="r", which=ItemFilter(allow_categories=("x",)), boost=0.5)
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, rules=(rule,)))
    assert Degradation.FIRST_STAGE_ORDER in answer.degradations


def test_pools_of_another_version_prove_nothing() -> None:
    pool = Pool(item_ids=["a"], scores=[1.0], bound=0.5, index_version="i1")
    rule = Rule(name="r", which=ItemFilter(allow_categories=("x",)), boost=0.25)
    same = Pool(item_ids=["a", "b"], scores=[1.0, 0.1], bound=0.05, index_version="i1")
    joined = with_own_pools(pool, [(rule, same)])
    assert list(joined.item_ids) == ["a", "b"]
    assert joined.bound == pytest.approx(0.5)
    for other in (None, replace(same, index_version="i2"), replace(same, bound=None)):
        assert with_own_pools(pool, [(rule, other)]).bound is None
    assert with_own_pools(replace(pool, bound=None), [(rule, same)]).bound is None
    # Boosts add to what votes leave of a similarity.
    voted = with_own_pools(replace(pool, votes=[0.0], model_share=0.5), [(rule, replace(same, bound=0.4))])
    assert voted.bound == pytest.approx(0.9)
    assert list(voted.votes) == [0.0, 0.0]


def message(**fields: Any) -> common_pb2.Rule:
    return common_pb2.Rule(**{"name": "r", "categories": ["x"], "boost": 0.5, **fields})


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([message()] * 9, "rules='9 rules' allowed: at most 8"),
        ([message(name="")], r"rules\[0\].name='text of 0 bytes'"),
        (
            [message(), common_pb2.Rule(name="r", boost=1)],
            r"rules\[1\]='every item' allowed: item_ids, categories or where",
        ),
        ([message(categories=[""])], r"rules\[0\].categories\[0\]='text of 0 bytes'"),
        ([message(item_ids=["a"] * 1001)], r"rules\[0\].item_ids='1001 entries' allowed: at most 1000"),
        ([common_pb2.Rule(name="r", categories=["x"])], r"rules\[0\].effect='none, or 0' allowed: one of boost, bury"),
        ([message(boost=math.nan)], r"rules\[0\].boost=nan allowed: above 0, at most 1000"),
        ([message(boost=-1.0)], r"rules\[0\].boost=-1.0 allowed"),
        ([common_pb2.Rule(name="r", categories=["x"], bury=math.inf)], r"rules\[0\].bury=inf allowed"),
        ([common_pb2.Rule(name="r", categories=["x"], pin=1001)], r"rules\[0\].pin=1001 allowed"),
        ([message(where=[{"name": "colour", "comparison": 7}])], r"rules\[0\].where\[0\]: name='colour' allowed"),
        ([message(where=[{"name": "price", "comparison": 0}])], r"rules\[0\].where\[0\].comparison=0 allowed"),
    ],
)
async def test_a_bad_rule_is_refused_by_field(rules: list[common_pb2.Rule], says: str, scene: Scene) -> None:
    async with gateway(scene) as stub:
        with pytest.raises(Exception, match=says):
            await stub.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2, rules=rules), timeout=5)
        with pytest.raises(Exception, match=says):
            await stub.Explain(gateway_pb2.ExplainRequest(user_id="ann", item_id="b", rules=rules), timeout=5)
    assert scene.candidates.calls == 0


def file_of(folder: Path, text: str) -> Path:
    (folder / "rules.yaml").write_text(text)
    return folder / "rules.yaml"


def test_standing_rules_are_read_from_yaml(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        "rules:\n- {name: a, categories: [x], where: ['price<=20'], boost: 0.1}\n- {name: b, item_ids: ['1'], pin: 2}",
    )
    first, second = standing_rules(file, ATTRIBUTES.kinds)
    assert (first.name, first.boost, first.which.allow_categories) == ("a", 0.1, ("x",))
    assert [one.name for one in first.which.where] == ["price"]
    assert (second.which.allow_item_ids, second.pin) == (("1",), 2)
    assert standing_rules(None, ATTRIBUTES.kinds) == []


def test_a_files_rules_are_written_as_they_are_read() -> None:
    where = [
        "price<=20.5",
        'maker in "x","7"',
        'maker not in "y"',
        "released>=2026-01-01T08:00:00.250000+00:00",
        "has price",
        "has no maker",
    ]
    plain = [
        {"name": "a: [odd] # name", "categories": ["Drama, odd"], "where": where, "boost": 0.1},
        {"name": "b", "item_ids": ["661", "true"], "pin": 2},
    ]
    rules = rules_from("rules", plain)
    assert parse_rules("rules", rules_text(rules)) == rules
    assert yaml.safe_load(rules_text(rules)) == {"rules": plain}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "allowed: `rules:` and a list below it"),
        ("rules: [", "cannot be read"),
        pytest.param("rules: " + "[" * 2_000, "cannot be read", id="deep"),
        ("rules: [x]", r"rules\[0\]='x' allowed: keys name, item_ids"),
        ("rules: [{name: a, colour: red, boost: 1}]", r"rules\[0\]\.colour='an unknown key'"),
        ("rules: [{name: a, categories: [x], boost: 1, pin: 1}]", r"rules\[0\]='none or several effects'"),
        (
            "rules: [{name: a, item_ids: [1], boost: 1}]",
            r"rules\[0\]\.item_ids=.* allowed: a list of texts",
        ),
        ("rules: [{name: a, categories: [x], boost: high}]", r"rules\[0\]\.boost='high' allowed: a number"),
        ("rules: [{name: a, categories: [x], pin: 1.5}]", r"rules\[0\]\.pin='1\.5' allowed: a whole number"),
        ("rules: [{name: a, where: ['price !!'], boost: 1}]", r"rules\[0\]\.where: condition='price !!'"),
        ("rules: [{name: a, where: ['colour=red'], boost: 1}]", r"rules\[0\]\.where\[0\]: name='colour' allowed"),
        ("rules: [{name: a, boost: 1}]", r"rules\[0\]='every item'"),
    ],
)
def test_a_file_that_says_something_else_stops_the_gateway(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^FRESHET_GATEWAY_RULES: .*{says}"):
        standing_rules(file_of(tmp_path, text), ATTRIBUTES.kinds)
    with pytest.raises(ConfigError, match="cannot be read"):
        standing_rules(tmp_path / "nowhere", ATTRIBUTES.kinds)


async def test_rules_are_put_without_a_restart_and_answers_and_exposures_name_their_revision(scene: Scene) -> None:
    async with gateway(scene) as stub:
        found = await stub.ListRules(gateway_pb2.ListRulesRequest(), timeout=5)
        assert (found.revision, list(found.rules)) == (0, [])
        put = await stub.PutRules(gateway_pb2.PutRulesRequest(rules=[message()]), timeout=5)
        assert (put.revision, put.is_applied) == (1, True)
        listed = await stub.ListRules(gateway_pb2.ListRulesRequest(), timeout=5)
        assert (listed.revision, list(listed.rules)) == (1, [message()])
        answer = await stub.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2, page_depth=4), timeout=5)
        assert answer.rules_revision == scene.exposures.written[-1][1].rules_revision == 1
        with pytest.raises(Exception, match="expected_revision=0 allowed: 1, the present one") as failure:
            await stub.PutRules(gateway_pb2.PutRulesRequest(), timeout=5)
        assert failure.value.code() is grpc.StatusCode.ABORTED  # type: ignore[attr-defined]
        await stub.PutRules(gateway_pb2.PutRulesRequest(expected_revision=1), timeout=5)
        # A page is of the list that was made before.
        page = gateway_pb2.RecommendRequest(user_id="ann", k=2, page_token=answer.next_page_token)
        assert (await stub.Recommend(page, timeout=5)).rules_revision == 1
        after = await stub.Recommend(gateway_pb2.RecommendRequest(user_id="ann", k=2), timeout=5)
        assert (after.rules_revision, scene.recommend.rules.now.rules) == (2, ())


async def test_rules_can_be_tried_in_place_of_the_standing_ones(scene: Scene) -> None:
    standing = Rule(name="house", which=ItemFilter(allow_categories=("x",)), boost=0.5)
    own = Rule(name="own", which=ItemFilter(allow_categories=("y",)), bury=0.5)
    scene.recommend.rules.apply(StandingRules(revision=1, rules=(standing,)))
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=2, rules=(own,), without_standing_rules=True))
    assert (list(scene.reranker.rules[-1]), answer.rules_revision) == ([own], 0)


async def test_a_rule_that_the_model_does_not_allow_is_refused_or_left_out_by_name(scene: Scene) -> None:
    good, bad = message(), message(name="bad", where=[{"name": "colour", "comparison": 7}])
    async with gateway(scene) as stub:
        with pytest.raises(Exception, match=r"rules\[1\].where\[0\]: name='colour' allowed"):
            await stub.PutRules(gateway_pb2.PutRulesRequest(rules=[good, bad]), timeout=5)
        assert scene.routes.standing is None
        # As another gateway put them, whose model has colours.
        scene.routes.apply_rules(StandingRules(revision=1, rules=rules_of([good, bad])))
        found = await stub.ListRules(gateway_pb2.ListRulesRequest(), timeout=5)
    assert [rule.name for rule in found.rules] == ["r", "bad"]
    assert [rule.name for rule in scene.recommend.rules.now.rules] == ["r"]
    assert [problem.split(" allowed")[0] for problem in found.problems] == ["rules[1].where[0]: name='colour'"]
