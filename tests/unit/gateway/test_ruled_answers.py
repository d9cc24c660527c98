"""Rules hold in every answer: random catalogues, rules, filters, impressions and reserved shares, through real
candidates and the real reranker, against a loop over all items."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
from gateway_scene import STORED, Scene
from prometheus_client import CollectorRegistry
from retrieval_scene import half, make_bundle, make_queries, state_fields

from services.algorithms.indexes.protocol import ESTIMATE, EXACT
from services.algorithms.items.live_catalogue import MAX_VERSIONS
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.attributes import Comparison, Condition
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.candidates import bootstrap as candidates
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import CandidatesServicer
from services.compact.bootstrap import InProcess
from services.contracts.topics.items import CatalogueItem
from services.contracts.wire import PackedQueryState
from services.gateway.adapters.processes import RemoteCandidates, RemoteReranker
from services.gateway.domain import Recommendation, RecommendQuery
from services.gateway.recommend.popular import PopularItems
from services.gateway.recommend.repeats import packed_items
from services.gateway.stages import Limits, Preferences
from services.platform.errors import DependencyUnavailable
from services.reranker import bootstrap as reranker
from services.reranker.handlers import RerankerMetrics
from services.reranker.server import RerankerServicer
from services.user_state.layout import IMPRESSIONS
from services.user_state.values import now_ms

POOL, NEW, DISCOUNT = 10, 12, 0.05
ALL = ItemFilter(exclude_seen=False)


class World:
    """A random catalogue, the exact scores of its one user, and the plain rules."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.count = int(rng.integers(50, 150))
        names = [f"kind-{number}" for number in range(rng.integers(3, 9))]
        self.categories = [
            tuple(rng.choice(names, rng.integers(1, 4), replace=False).tolist()) for _ in range(self.count)
        ]
        self.prices = rng.integers(0, 50, self.count).astype(float).tolist()
        ids = [f"item-{row}" for row in range(self.count)]
        table = pa.table({"item_id": ids, "price": self.prices}).select(["price"])
        self.bundle = make_bundle(folder, seed=seed, count=self.count, categories=self.categories, attributes=table)
        queries = half(make_queries(rng, 1, 4, 2, 8))
        self.state = PackedQueryState(**state_fields(queries, self.bundle.model_version))
        self.exact = mol_scores_reference(queries, self.bundle.item_states, self.bundle.pair_gate).numpy()[0]
        self.names = names
        self.discounted: set[int] = set()

    def popular(self) -> PopularItems:
        """The catalogue of the gateway, whose bundle knows nothing of the last items."""
        known = self.count - NEW
        counts = np.arange(known, dtype=np.int64)
        attributes = self.bundle.attributes.take(list(range(known)))
        made = PopularItems(self.bundle.item_ids[:known], counts, self.categories[:known], attributes)
        made.describe(
            [
                CatalogueItem(
                    item_id=f"item-{row}",
                    categories=self.categories[row],
                    attributes={"price": self.prices[row]},
                    written_ms=now_ms(),
                )
                for row in range(known, self.count)
            ]
        )
        return made

    def some_items(self) -> ItemFilter:
        """What a rule names."""
        rng, kind = self.rng, self.rng.integers(0, 4)
        categories = tuple(rng.choice(self.names, rng.integers(1, 3), replace=False).tolist()) if kind != 1 else ()
        rows = rng.choice(self.count, rng.integers(1, 12), replace=False).tolist()
        ids = tuple(f"item-{row}" for row in rows) if kind in (1, 2) else ()
        where = (Condition("price", Comparison.AT_MOST, (float(rng.integers(5, 45)),)),) if kind == 3 else ()
        return replace(ALL, allow_item_ids=ids, allow_categories=categories, where=where)

    def some_rule(self, number: int) -> Rule:
        size = float(self.rng.choice([0.01, 0.1, 1.0]))
        effects: list[dict[str, float]] = [
            {"boost": size},
            {"bury": size},
            {"pin": int(self.rng.integers(1, 8))},
            {"cap": int(self.rng.integers(1, 4))},
        ]
        return Rule(name=f"r{number}", which=self.some_items(), **effects[self.rng.integers(0, 4)])  # type: ignore[arg-type]

    def some_query(self) -> RecommendQuery:
        rng = self.rng
        wanted = ALL
        if rng.random() < 0.3:
            wanted = replace(wanted, deny_categories=(str(rng.choice(self.names)),))
        if rng.random() < 0.2:
            rows = rng.choice(self.count, self.count // 2, replace=False).tolist()
            wanted = replace(wanted, allow_item_ids=tuple(f"item-{row}" for row in rows))
        return RecommendQuery(
            user_id="ann",
            k=int(rng.integers(1, 16)),
            filter=wanted,
            max_per_category=int(rng.choice([0, 1, 2, 4])),
            rules=tuple(self.some_rule(number) for number in range(rng.integers(0, 5))),
        )

    def named(self, which: ItemFilter, row: int) -> bool:
        return (
            (not which.allow_item_ids or f"item-{row}" in which.allow_item_ids)
            and (not which.allow_categories or not set(which.allow_categories).isdisjoint(self.categories[row]))
            and set(which.deny_categories).isdisjoint(self.categories[row])
            and all(self.prices[row] <= float(one.values[0]) for one in which.where)
        )

    def final(self, query: RecommendQuery, row: int) -> float:
        added = sum(rule.boost - rule.bury for rule in query.rules if self.named(rule.which, row))
        return float(self.exact[row]) + added - (DISCOUNT if row in self.discounted else 0)

    def admits(self, query: RecommendQuery, taken: Sequence[int], row: int) -> bool:
        """Whether the limits leave room for an item beside those that are taken."""
        limit = query.max_per_category
        kinds_fit = not limit or all(
            sum(kind in self.categories[one] for one in taken) < limit for kind in self.categories[row]
        )
        return kinds_fit and all(
            sum(self.named(rule.which, one) for one in taken) < rule.cap
            for rule in query.rules
            if rule.cap and self.named(rule.which, row)
        )

    def best(self, query: RecommendQuery) -> tuple[list[int], dict[int, int]]:
        """The answer by a loop over all items, and what is pinned in it, by position from 0."""
        allowed = [row for row in range(self.count) if self.named(query.filter, row)]
        ranked = sorted(allowed, key=lambda row: -self.final(query, row))
        taken: list[int] = []
        pins: dict[int, int] = {}
        for rule in query.rules:
            for row in ranked:
                free = rule.pin and rule.pin - 1 not in pins and row not in taken
                if free and self.named(rule.which, row) and self.admits(query, taken, row):
                    pins[rule.pin - 1] = row
                    taken.append(row)
                    break
        rest = []
        for row in ranked:
            if row not in taken and len(rest) < query.k and self.admits(query, taken, row):
                rest.append(row)
                taken.append(row)
        answer: list[int] = []
        for position in range(len(rest) + len(pins)):
            if position in pins:
                answer.append(pins[position])
            elif rest:
                answer.append(rest.pop(0))
        answer += [row for _, row in sorted(pins.items()) if row not in answer]
        shown = answer[: query.k]
        return shown, {shown.index(row): row for row in pins.values() if row in shown}

    def check_limits(self, query: RecommendQuery, rows: Sequence[int]) -> None:
        for at, row in enumerate(rows):
            assert self.admits(query, rows[:at], row), f"position {at} of {rows}"


class Served:
    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        settings = CandidatesSettings(port=0, metrics_port=0, bundle=folder, audit_share=0, drain_seconds=0)
        metrics = CandidatesMetrics(CollectorRegistry())
        self.live = candidates.make_live(
            settings, candidates.load_catalogue(settings), metrics, max_versions=MAX_VERSIONS
        )
        self.rerank = reranker.Rerank(catalogue=self.live.catalogue, metrics=RerankerMetrics(CollectorRegistry()))

    async def scene(self, share: float = 0.0) -> Scene:
        world = self.world
        scene = Scene(
            candidates=RemoteCandidates(InProcess(CandidatesServicer(self.live.search))),  # type: ignore[arg-type]
            reranker=RemoteReranker(InProcess(RerankerServicer(self.rerank))),  # type: ignore[arg-type]
            popular=world.popular(),
            limits=Limits(pool_size=POOL, budget_s=60, state_timeout_s=10, stage_timeout_s=10),
            preferences=Preferences(new_item_share=share, impression_discount=DISCOUNT, impression_half_life_s=1e9),
            rng=Random(int(world.rng.integers(1 << 30))),
        )
        scene.states.states["ann"] = replace(STORED, query_state=world.state)
        scene.states.seen["ann"] = []
        world.discounted = set(world.rng.choice(world.count, world.rng.integers(0, 20), replace=False).tolist())
        if world.discounted:
            entry = packed_items(now_ms(), [f"item-{row}" for row in sorted(world.discounted)])
            await scene.sessions.push(IMPRESSIONS, "ann", entry, most=100, ttl_seconds=1000)
        return scene


@pytest_asyncio.fixture
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(World(request.param, tmp_path / "bundle"), tmp_path / "bundle")
    yield made
    await made.live.search.close()
    await made.rerank.close()


def rows_of(answer: Recommendation) -> list[int]:
    return [int(item.item_id.removeprefix("item-")) for item in answer.items]


@pytest.mark.parametrize("served", range(12), indirect=True)
async def test_an_answer_is_as_long_as_the_limits_allow_and_its_items_those_of_a_loop_over_all(served: Served) -> None:
    world = served.world
    for _ in range(8):
        scene, query = await served.scene(), world.some_query()
        answer = await scene.recommend(query)
        found, (wanted, _) = rows_of(answer), world.best(query)
        world.check_limits(query, found)
        assert not answer.degradations
        assert len(found) == len(wanted)
        assert answer.certificate != ESTIMATE
        if answer.certificate == EXACT:
            assert found == wanted
        scores = [item.score for item in answer.items]
        assert scores == pytest.approx([world.final(query, row) for row in found], abs=1e-6)


@pytest.mark.parametrize("served", range(12), indirect=True)
async def test_a_pool_grows_until_the_gap_is_proven(served: Served) -> None:
    world = served.world
    for turn in range(9):
        scene, query = await served.scene(), replace(world.some_query(), max_gap=(0.0, 0.01, 0.05)[turn % 3])
        answer = await scene.recommend(query)
        found, (wanted, _) = rows_of(answer), world.best(query)
        assert not answer.degradations
        assert answer.certificate.proves(query.max_gap or 0.0)
        if answer.certificate == EXACT:
            assert found == wanted


@pytest.mark.parametrize("served", range(12), indirect=True)
async def test_rules_hold_where_positions_are_reserved(served: Served) -> None:
    world = served.world
    for share in (0.1, 0.3, 0.5, 1.0) * 2:
        scene, query = await served.scene(share), world.some_query()
        answer = await scene.recommend(query)
        found, (wanted, pins) = rows_of(answer), world.best(query)
        world.check_limits(query, found)
        assert len(found) == len(wanted)
        new = {at for at, item in enumerate(answer.items) if item.source == "new"}
        for at in new:
            assert found[at] >= world.count - NEW
            assert world.named(query.filter, found[at])
            assert not any(rule.bury and world.named(rule.which, found[at]) for rule in query.rules)
        scores = [item.score for item in answer.items]
        assert scores == pytest.approx([world.final(query, row) for row in found], abs=1e-6)
        if answer.certificate == EXACT:
            assert {at: found[at] for at in pins} == pins
            ordinary = [row for at, row in enumerate(found) if at not in new and at not in pins]
            ranked = [row for at, row in enumerate(wanted) if at not in pins]
            # Whose pin lies behind the end may be any item there that it names.
            if all(rule.pin <= len(wanted) for rule in query.rules):
                assert ordinary == ranked[: len(ordinary)]


@pytest.mark.parametrize("served", range(8), indirect=True)
@pytest.mark.parametrize("away", ["reranker", "candidates"])
async def test_limits_hold_where_the_reranker_or_candidates_do_not_answer(served: Served, away: str) -> None:
    world = served.world
    for _ in range(8):
        scene, query = await served.scene(), world.some_query()

        class Away:
            def __getattr__(self, name: str) -> object:
                async def call(*_: object, **__: object) -> None:
                    raise DependencyUnavailable("away")

                return call

        object.__setattr__(scene.ports, away, Away())
        answer = await scene.recommend(query)
        assert answer.degradations or not (query.rules or query.max_per_category)
        world.check_limits(query, rows_of(answer))
        for rule in query.rules:
            if 0 < rule.pin <= len(answer.items) and sum(bool(one.pin or one.cap) for one in query.rules) == 1:
                named = [row for row in range(world.count) if world.named(rule.which, row)]
                named = [row for row in named if world.named(query.filter, row)]
                assert not named or rows_of(answer)[rule.pin - 1] in named
