"""A catalogue in shards answers as the whole does: real indexes and servicers, called without a wire."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from retrieval_scene import make_items, make_neighbours, make_pair_gate, make_queries, state_fields
from structlog.testing import capture_logs

from services.algorithms.indexes.protocol import ESTIMATE, EXACT
from services.algorithms.item_table.strings import Strings
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.rules.filters import ItemFilter
from services.candidates.bootstrap import Live, make_live, shard_rows
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.candidates.server import CandidatesServicer
from services.catalogue.changes import CatalogueChanges
from services.compact.bootstrap import InProcess
from services.contracts.shards import Shard, home_shard
from services.contracts.topics.index_deltas import Batch, IndexDelta, ItemDelta
from services.contracts.topics.items import CatalogueItem
from services.contracts.wire import PackedQueryState
from services.gateway.adapters.processes import RemoteCandidates
from services.gateway.adapters.shards import ShardedCandidates, share_of_pool
from services.gateway.domain import Pool, Ranking, Seen
from services.platform.config import ConfigError
from services.platform.errors import DependencyUnavailable, NotFound

X, N, MODEL = 200, 4, "m"
IDS = [f"item-{row}" for row in range(X)]
CATEGORIES = ("a", "b", "c")
# Sizes leave something out.
ALGORITHMS = (
    "exact exact_low_precision top_k_avg(20) top_k_per_embedding(8) combined_top_k(8,20) quantized_tangents(20)"
)


class Process:
    """Candidates, of a shard or of all."""

    def __init__(self, base: Catalogue, shard: Shard, max_versions: int = 64) -> None:
        settings = CandidatesSettings(audit_share=0, algorithms=ALGORITHMS, shard=shard)
        self.metrics = CandidatesMetrics(CollectorRegistry())
        part = base if shard.is_all else base.part(shard_rows(shard, base.rows.strings))
        self.live: Live = make_live(settings, part, self.metrics, max_versions=max_versions)
        self.changes = CatalogueChanges(self.live.catalogue, self.metrics.catalogue, holds=shard.holds)
        self.servicer = CandidatesServicer(self.live.search)
        self.peer = Peer(self.servicer)
        self.remote = RemoteCandidates(self.peer, shard)


class Peer(InProcess):
    """`before` may wait or raise, by how often it was called."""

    def __init__(self, servicer: Any) -> None:
        super().__init__(servicer)
        self.calls = 0
        self.before: Callable[[int], Any] | None = None

    async def call(self, *args: Any, **others: Any) -> Any:
        self.calls += 1
        if self.before is not None:
            await self.before(self.calls)
        return await super().call(*args, **others)


class Scene:
    def __init__(self, *, with_neighbours: bool = False, algorithm: str = "", max_versions: int = 64) -> None:
        rng = np.random.default_rng(5)
        self.items, self.gate = make_items(rng, X, 4, 2, 8), make_pair_gate(rng, 8, 16)
        # Two that no score tells apart.
        self.items.components[7], self.items.gate[7] = self.items.components[3], self.items.gate[3]  # type: ignore[index]
        base = Catalogue(
            model_version=MODEL, item_ids=IDS, titles=IDS, categories=[(CATEGORIES[row % 3],) for row in range(X)],
            states=self.items, pair_gate=self.gate, neighbours=make_neighbours(rng, X) if with_neighbours else None,
        )  # fmt: skip
        self.whole = Process(base, Shard(0, 1))
        self.parts = [Process(base, Shard(number, N), max_versions) for number in range(N)]
        self.told: Counter[tuple[str, int]] = Counter()
        self.sharded = ShardedCandidates(
            [part.remote for part in self.parts], patient_s=5.0, count=lambda *what: self.told.update([what])
        )
        self.position = 0
        self.rng = rng

    def state(self) -> PackedQueryState:
        return PackedQueryState(**state_fields(make_queries(self.rng, 1, 4, 2, 8), MODEL))

    def changed(self, *, without: int | None = None) -> None:
        """New states of ten items, one of them new, one gone; a shard may not hear of it."""
        self.position += 1
        states = make_items(self.rng, 10, 4, 2, 8)
        assert states.gate is not None
        ids = [*self.rng.choice(IDS, 9, replace=False).tolist(), f"new-{self.position}"]
        changes = [
            ItemDelta(item_id=one, components=states.components[row], gate=states.gate[row], num_interactions=3)
            for row, one in enumerate(ids[1:])
        ]
        changes.append(ItemDelta(item_id=ids[0], dropped=True))
        deltas = [
            IndexDelta(
                model_version=MODEL, partition=0, offset=self.position, batch=self.position, last_of_batch=True,
                change=change,
            )
            for change in changes
        ]  # fmt: skip
        batch = Batch(offset=self.position, deltas=deltas, newest_recorded_ms=1_700_000_000_000)
        for process in (self.whole, *(part for number, part in enumerate(self.parts) if number != without)):
            assert process.changes.apply(batch, is_live=True)

    def described(self, *items: CatalogueItem) -> None:
        for process in (self.whole, *self.parts):
            process.changes.describe(items)

    def asked(self) -> dict[str, Any]:
        """A filter by turns, and seen items."""
        seen = self.rng.choice(IDS, 12, replace=False).tolist()
        filters = (
            ItemFilter(exclude_seen=False),
            ItemFilter(),
            ItemFilter(allow_categories=("a", "b")),
            ItemFilter(deny_item_ids=tuple(self.rng.choice(IDS, 5).tolist())),
            ItemFilter(allow_item_ids=tuple(self.rng.choice(IDS, 9).tolist())),
        )
        return {"filter": filters[self.rng.integers(len(filters))], "seen": Seen(seen, seen[::3]), "timeout_s": 5.0}


@pytest.fixture(scope="module")
def still() -> Scene:
    """One that no test changes."""
    return Scene()


def content(answer: Ranking) -> tuple[Any, ...]:
    """Everything but times."""
    pairs = [(item.item_id, item.score) for item in answer.items]
    position = None if answer.index_freshness is None else answer.index_freshness.deltas_offset
    return pairs, answer.certificate, answer.index_version, position, answer.num_items


@pytest.mark.parametrize("with_neighbours", [False, True], ids=["model alone", "with item neighbours"])
async def test_the_answer_and_its_certificate_are_the_wholes(with_neighbours: bool) -> None:
    scene = Scene(with_neighbours=with_neighbours)
    for turn in range(200):
        if turn % 5 == 4:
            scene.changed()
        if turn == 50:
            scene.described(*(CatalogueItem(item_id=one, withdrawn=True) for one in IDS[:20]))
        state, asked, k = scene.state(), scene.asked(), int(scene.rng.choice([1, 10, 60, 300]))
        found = await scene.sharded.search(state, k=k, **asked)
        assert content(found) == content(await scene.whole.remote.search(state, k=k, **asked))
        assert found.certificate == EXACT
        assert found.searched_share == 1
    assert not any(what == "missing" for what, _ in scene.told)


async def best_left_out(scene: Scene, state: PackedQueryState, asked: dict[str, Any], there: set[str]) -> float:
    everything = await scene.whole.remote.search(state, k=10_000, **asked)
    return max((item.score for item in everything.items if item.item_id not in there), default=-np.inf)


@pytest.mark.parametrize("algorithm", ALGORITHMS.split())
async def test_no_bound_is_broken_and_no_more_is_lost(still: Scene, algorithm: str) -> None:
    recalls: dict[str, list[float]] = {"whole": [], "sharded": []}
    for _ in range(40):
        state, asked = still.state(), still.asked()
        best = [one.item_id for one in (await still.whole.remote.search(state, k=10, **asked)).items]
        for name, candidates in (("whole", still.whole.remote), ("sharded", still.sharded)):
            with chosen(still, algorithm):
                pool: Pool = await candidates.propose(state, k=40, **asked)
                full = await candidates.search(state, k=20, **asked)
            assert list(pool.scores) == sorted(pool.scores, reverse=True)
            assert len(set(pool.item_ids)) == len(pool.item_ids)
            recalls[name].append(len(set(best) & set(pool.item_ids)) / max(1, len(best)))
            if pool.bound is not None:
                assert await best_left_out(still, state, asked, set(pool.item_ids)) <= pool.bound
            if full.certificate != ESTIMATE and full.items:
                left_out = await best_left_out(still, state, asked, {item.item_id for item in full.items})
                assert left_out <= full.items[-1].score + full.certificate.gap
    # Each shard takes its own sample for its tangents: alike over 300 draws (.959 and .958), not over 40.
    by_chance = 0.03 if algorithm.startswith("quantized_tangents") else 0.0
    assert np.mean(recalls["sharded"]) >= np.mean(recalls["whole"]) - by_chance


@pytest.mark.parametrize("with_neighbours", [False, True], ids=["model alone", "with item neighbours"])
async def test_a_gap_is_proven_over_all_shards_and_never_broken(with_neighbours: bool) -> None:
    scene = Scene(with_neighbours=with_neighbours)
    bounded = 0
    for turn in range(120):
        if turn % 5 == 4:
            scene.changed()
        state, asked, max_gap = scene.state(), scene.asked(), (0.0, 0.01, 0.05, 0.3)[turn % 4]
        for candidates in (scene.whole.remote, scene.sharded):
            found = await candidates.search(state, k=10, max_gap=max_gap, **asked)
            gap = found.certificate.gap
            assert gap is not None
            assert 0 <= gap <= max_gap
            assert found.items_touched > 0
            if found.items:
                left_out = await best_left_out(scene, state, asked, {item.item_id for item in found.items})
                assert left_out <= found.items[-1].score + gap
            if gap == 0:
                assert found.items == (await scene.whole.remote.search(state, k=10, **asked)).items
            bounded += gap > 0
    assert bounded > 0


@contextmanager
def chosen(scene: Scene, algorithm: str) -> Iterator[None]:
    """The algorithm of the searches that name none, in every process."""
    searches = [process.live.search for process in (scene.whole, *scene.parts)]
    before = [search._choice for search in searches]
    for search in searches:
        search._choice = type("Always", (), {"of": lambda *_: algorithm, "took": lambda *_: None})()
    yield
    for search, choice in zip(searches, before, strict=True):
        search._choice = choice


async def test_a_change_that_one_shard_has_not_heard_of_is_left_out_everywhere() -> None:
    scene = Scene()
    scene.changed()
    state, asked = scene.state(), scene.asked()
    before = content(await scene.whole.remote.search(state, k=30, **asked))
    pool = await scene.sharded.propose(state, k=40, **asked)
    scene.changed(without=2)
    found = await scene.sharded.search(state, k=30, **asked)
    assert content(found)[:4] == before[:4]
    assert found.certificate == EXACT
    again = await scene.sharded.propose(state, k=40, **asked)
    assert (again.item_ids, again.scores, again.bound) == (pool.item_ids, pool.scores, pool.bound)
    assert again.index_version == before[2]


async def test_versions_that_are_not_kept_cannot_be_made_one() -> None:
    scene = Scene(max_versions=1)
    scene.changed(without=2)
    state, asked = scene.state(), scene.asked()
    found = await scene.sharded.search(state, k=30, **asked)
    assert found.certificate == ESTIMATE
    assert found.index_version.startswith("mixed.")
    assert found.searched_share == 1
    assert (await scene.sharded.propose(state, k=40, **asked)).bound is None


async def test_an_answer_is_as_fresh_as_its_oldest_shard() -> None:
    scene = Scene(max_versions=1)
    scene.changed()
    scene.changed(without=2)
    state, asked = scene.state(), scene.asked()
    assert content(await scene.sharded.search(state, k=30, **asked))[3] == 1
    assert (await scene.sharded.propose(state, k=40, **asked)).index_freshness.deltas_offset == 1


async def unavailable(_: int) -> None:
    raise DependencyUnavailable("away")


async def test_a_shard_that_is_away_is_missing_and_said_so() -> None:
    scene = Scene()
    state, everything = scene.state(), {"filter": ItemFilter(exclude_seen=False), "seen": Seen(), "timeout_s": 5.0}
    wanted = await scene.sharded.search(state, k=X, **everything)
    scene.parts[1].peer.before = unavailable
    for _ in range(5):
        found = await scene.sharded.search(state, k=X, **everything)
        there = [item for item in wanted.items if home_shard(item.item_id, N) != 1]
        assert found.items == there
        assert found.searched_share == pytest.approx(len(there) / X)
        assert found.certificate == ESTIMATE
        pool = await scene.sharded.propose(state, k=40, **everything)
        assert pool.bound is None
        assert pool.searched_share == found.searched_share
    # It is left alone for a moment: not every answer asks it.
    assert scene.parts[1].peer.calls < 8
    assert scene.told["missing", 1] == 10
    scene.parts[1].peer.before = None
    await asyncio.sleep(0.6)
    assert await scene.sharded.search(state, k=X, **everything) == replace(
        wanted,
        queue_ms=pytest.approx(0, abs=1e4),
        stage_ms=pytest.approx(0, abs=1e4),
        items_touched=pytest.approx(0, abs=1e4),
    )


async def test_without_any_shard_there_is_no_answer() -> None:
    scene = Scene()
    for part in scene.parts:
        part.peer.before = unavailable
    with pytest.raises(DependencyUnavailable, match="none of 4 shards answered"):
        await scene.sharded.search(scene.state(), k=5, filter=ItemFilter(), seen=Seen(), timeout_s=5.0)


@pytest.mark.parametrize("wrong", ["overlap", "whole", "another count"])
async def test_a_process_of_another_shard_is_refused_by_name(wrong: str) -> None:
    scene = Scene()
    other = scene.parts[0] if wrong == "overlap" else scene.whole
    if wrong == "another count":
        other = Process(scene.whole.live.catalogue.base, Shard(1, 3))
    shards = [part.remote for part in scene.parts]
    shards[1] = RemoteCandidates(InProcess(other.servicer), Shard(1, N))
    sharded = ShardedCandidates(shards, patient_s=5.0)
    with capture_logs() as logs:
        found = await sharded.search(scene.state(), k=5, filter=ItemFilter(), seen=Seen(), timeout_s=5.0)
    holds = {"overlap": "0/4", "whole": "0/1", "another count": "1/3"}[wrong]
    assert [one["reason"] for one in logs if one["event"] == "dependency_refused"] == [
        f"candidates shard 1/4: it holds shard {holds}; allowed: 1/4, as FRESHET_CANDIDATES_ADDRESS has it"
    ]
    assert found.searched_share < 1
    assert not any(home_shard(item.item_id, N) == 1 for item in found.items)


async def test_items_like_one_are_the_wholes_wherever_it_lies() -> None:
    scene = Scene()
    scene.changed()
    for item_id in [*IDS[::17], "new-1"]:
        asked = {"k": 15, "filter": ItemFilter(allow_categories=("a", "b")), "seen": (), "timeout_s": 5.0}
        found = await scene.sharded.similar(item_id, **asked)
        whole = await scene.whole.remote.similar(item_id, **asked)
        assert content(found)[:4] == content(whole)[:4]
    with pytest.raises(NotFound):
        await scene.sharded.similar("nobody's", k=5, filter=ItemFilter(), seen=(), timeout_s=5.0)


async def test_the_shard_that_holds_an_item_explains_its_vote() -> None:
    scene = Scene(with_neighbours=True)
    state, seen = scene.state(), Seen(IDS[:8], IDS[:8:3])
    voted = await scene.whole.remote.propose(state, k=30, filter=ItemFilter(), seen=seen, timeout_s=5.0)
    item_id = max(zip(voted.votes, voted.item_ids, strict=True))[1]
    asked = {"seen": seen, "timeout_s": 5.0}
    found = await scene.sharded.explain_votes(state, item_id, **asked)
    assert found == await scene.whole.remote.explain_votes(state, item_id, **asked)
    assert found.vote > 0


async def test_a_late_shard_is_asked_once_more_and_the_first_answer_counts() -> None:
    scene = Scene()

    async def hangs_once(calls: int) -> None:
        if calls == 1:
            await asyncio.Event().wait()

    scene.parts[3].peer.before = hangs_once
    state, asked = scene.state(), scene.asked()
    found = await asyncio.wait_for(scene.sharded.search(state, k=10, **asked), 60)
    assert content(found) == content(await scene.whole.remote.search(state, k=10, **asked))
    # A busy machine may ask the second time too, never a third.
    assert 1 <= scene.told["hedged", 3] <= 2
    assert scene.parts[3].peer.calls == 1 + scene.told["hedged", 3]


async def test_calls_made_once_more_are_few() -> None:
    scene, allowed, told_before = Scene(), 20.0, 0

    async def late_until_asked_again(_: int) -> None:
        # Not where rounding decides whether one more is allowed.
        while scene.told["hedged", 3] == told_before and allowed - scene.told.total() > 1.01:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    scene.parts[3].peer.before = late_until_asked_again
    for _ in range(60):
        told_before = scene.told["hedged", 3]
        await scene.sharded.search(scene.state(), k=10, **scene.asked())
        allowed += N * 0.05
    # On a busy machine others are late too, and are counted with it.
    assert {what for what, _ in scene.told} == {"hedged"}
    assert -0.01 < allowed - scene.told.total() < 1.3


async def test_who_never_answers_is_missing_when_the_time_is_up() -> None:
    scene = Scene()

    async def never(_: int) -> None:
        await asyncio.sleep(30)

    scene.parts[0].peer.before = never
    asked = scene.asked() | {"timeout_s": 0.3}
    with pytest.raises(TimeoutError):
        # A peer that honours no deadline: the caller's own ends it, and no call of it stays.
        await asyncio.wait_for(scene.sharded.search(scene.state(), k=10, **asked), 0.4)
    left = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "attempt"]  # type: ignore[union-attr]
    await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 5)


def test_hashes_divide_a_catalogue_evenly_and_for_good() -> None:
    counts = Counter(home_shard(f"item-{number}", 8) for number in range(80_000))
    assert set(counts) == set(range(8))
    assert max(abs(count - 10_000) for count in counts.values()) < 400
    # What is on disk and in other processes depends on it.
    assert [home_shard(one, 256) for one in ("a", "item-1", "ä")] == [64, 228, 240]
    halves = {one: home_shard(one, 2) for one in IDS}
    assert all(home_shard(one, 4) // 2 == half for one, half in halves.items())


@pytest.mark.parametrize("text", ["", "1", "4/4", "-1/4", "0/0", "0/257", "a/b", "0/4/1", " 0/4"])
def test_shards_that_there_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: i/n"):
        Shard.parse(text)


def test_a_shard_of_nothing_is_refused() -> None:
    empty = 1 - home_shard(IDS[0], 2)
    with pytest.raises(ConfigError, match=f"FRESHET_CANDIDATES_SHARD='{empty}/2': none of 1 items"):
        shard_rows(Shard(empty, 2), Strings.of(IDS[:1]))


@pytest.mark.parametrize("at_once", [1_000, 65_536])
def test_rows_of_a_column_are_those_that_each_id_is_in(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.contracts.shards._HASHED", at_once)
    ids = Strings.of([f"é{number}" * (number % 12 + 1) for number in range(3_000)])
    for count in (1, 2, 3, 7, 256):
        homes = [home_shard(item_id, count) for item_id in ids]
        for index in {0, count // 2, count - 1}:
            assert Shard(index, count).rows(ids).tolist() == [row for row, home in enumerate(homes) if home == index]
    assert Shard(0, 3).rows(Strings.of([])).tolist() == []


@pytest.mark.parametrize(("size", "count"), [(200, 4), (20, 4), (1_000, 16), (1, 8), (10, 1)])
def test_a_shards_pool_holds_its_part_of_the_wholes(size: int, count: int) -> None:
    rng = np.random.default_rng(0)
    most = rng.multinomial(size, [1 / count] * count, 20_000)
    assert np.mean(most <= share_of_pool(size, count)) > 0.995


def test_settings_name_the_folder_by_shard(tmp_path: Path) -> None:
    assert CandidatesSettings(snapshots=str(tmp_path)).snapshot_folder == tmp_path
    sharded = CandidatesSettings(snapshots=str(tmp_path), shard="1/4")  # type: ignore[arg-type]
    assert sharded.snapshot_folder == tmp_path / "shard-1-of-4"
