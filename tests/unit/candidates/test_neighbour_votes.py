"""Item neighbours as they are served: the fused top K is brute force's, whatever the algorithm, filter and head."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from retrieval_scene import make_items, make_neighbours, make_pair_gate, make_queries

from services.algorithms.indexes.by_name import Algorithm, known_algorithms, parse_algorithm
from services.algorithms.items.catalogue import Catalogue
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.neighbours import MAX_VOTED, WINDOW
from services.algorithms.scoring.states import QueryStates
from services.candidates.bootstrap import host_build
from services.candidates.domain import SearchQuery, SearchResult, Stage, VotesQuery
from services.candidates.handlers import Search
from services.candidates.metrics import Audit, CandidatesMetrics
from services.candidates.votes import Voting
from services.contracts.shards import Shard
from services.contracts.topics.index_deltas import ItemDelta
from services.contracts.topics.items import CatalogueItem
from services.contracts.wire import ItemVotes
from services.offline.training.codebooks.inverted_file import catalogue_codebooks
from services.reranker.domain import RerankQuery
from services.reranker.handlers import Rerank, RerankerMetrics

X, IDS = 40, [f"i{row:02}" for row in range(40)]
# Every algorithm that the parser takes, the default of these tests first.
SIZES = {"N": "6", "N1,N2": "3,6", "N,C": "6,2"}
ALGORITHMS = ["exact"] + [
    "(".join((name, *(SIZES[form[:-1]] + ")" for form in rest)))
    for name, *rest in (one.split("(") for one in known_algorithms())
    if name != "exact"
]


def _can_have(algorithm: Algorithm, base: Catalogue) -> bool:
    try:
        host_build([algorithm], codebooks=base.codebooks)(MolScorer(base.states, base.pair_gate))
    except ValueError:
        return False
    return True


class Scene:
    """One head's items with neighbours, one query, and what serves them."""

    def __init__(self, p_q: int, p_x: int, *, with_neighbours: bool = True) -> None:
        rng = np.random.default_rng(8)
        items, pairs = make_items(rng, X, p_q, p_x, 4), p_q * p_x
        gate = make_pair_gate(rng, pairs, 4) if pairs > 1 else None
        self.query = make_queries(rng, 1, p_q, p_x, 4)
        self.s = mol_scores_reference(self.query, items, gate).numpy()[0]
        self.base = Catalogue(
            model_version="m", item_ids=IDS, titles=IDS, categories=[("even",), ("odd",)] * (X // 2),
            states=items, pair_gate=gate, neighbours=make_neighbours(rng, X) if with_neighbours else None,
            codebooks=catalogue_codebooks(items, gate),
        )  # fmt: skip
        # Some are for a dot product alone, others for mixtures.
        possible = [one for one in map(parse_algorithm, ALGORITHMS) if _can_have(one, self.base)]
        self.algorithms = [one.text for one in possible]
        self.catalogue = LiveCatalogue(self.base, build=host_build(possible, codebooks=self.base.codebooks))
        self.metrics = CandidatesMetrics(CollectorRegistry())
        self.search = Search(
            catalogue=self.catalogue, algorithms=self.algorithms, votes=Voting(self.base, None), metrics=self.metrics,
            audit=Audit(self.catalogue, share=0, report=self.metrics.audited),
        )  # fmt: skip

    def found(
        self,
        wanted: ItemFilter,
        k: int = 10,
        algorithm: str = "exact",
        stage: Stage = Stage.FULL,
        turned_down: Sequence[str] = (),
    ) -> SearchResult:
        query = SearchQuery(
            query=self.query, model_version="m", k=k, stage=stage, filter=wanted, algorithm=algorithm,
            turned_down_item_ids=turned_down,
        )  # fmt: skip
        return self.search.find_all([query])[0]

    def replace(self, item_id: str) -> None:
        """Withdraw an item; `new` comes with the same state."""
        state = self.base.states_of([item_id])
        gate = None if state.gate is None else state.gate[0]
        self.catalogue.describe([CatalogueItem(item_id=item_id, withdrawn=True)])
        self.catalogue.apply(1, [ItemDelta(item_id="new", components=state.components[0], gate=gate, model_share=0)])

    def final(self, wanted: ItemFilter, turned_down: Sequence[str] = ()) -> dict[str, float]:
        """By the definition, item by item, in plain Python."""
        neighbours = self.base.neighbours
        assert neighbours is not None
        sums = dict.fromkeys(IDS, 0.0)
        voting = [one for one in dict.fromkeys(wanted.seen_item_ids) if one in IDS and one not in turned_down]
        known = [IDS.index(one) for one in voting][:WINDOW]
        for back, row in enumerate(known):
            for item, weight in zip(neighbours.items[row], neighbours.weights[row], strict=True):
                if not (wanted.exclude_seen and IDS[item] in wanted.seen_item_ids):
                    sums[IDS[item]] += neighbours.shape.decay**back * float(weight)
        strongest, share = max(sums.values()) or 1.0, neighbours.shape.model_share
        return {one: share * self.s[row] + (1 - share) * sums[one] / strongest for row, one in enumerate(IDS)}


MIXTURE, DOT = Scene(2, 2), Scene(1, 1)
SEEN = st.lists(st.sampled_from([*IDS, "new", "unknown"]), max_size=12)


@given(
    scene=st.sampled_from([MIXTURE, DOT]),
    seen=SEEN,
    turned_down=SEEN,
    exclude_seen=st.booleans(),
    denied=st.lists(st.sampled_from(IDS), max_size=20),
    only=st.sampled_from([(), ("even",)]),
    k=st.integers(1, 12),
    number=st.integers(0, len(ALGORITHMS) - 1),
)
@settings(deadline=None, max_examples=200)
def test_fused_answers_keep_their_certificate_and_exact_ones_are_brute_forces(
    scene: Scene,
    seen: list[str],
    turned_down: list[str],
    exclude_seen: bool,
    denied: list[str],
    only: tuple[str, ...],
    k: int,
    number: int,
) -> None:
    wanted = ItemFilter(seen_item_ids=seen, exclude_seen=exclude_seen, deny_item_ids=denied, allow_categories=only)
    gone = {*denied, *(seen if exclude_seen else ()), *(IDS[1::2] if only else ())}
    final = {one: score for one, score in scene.final(wanted, turned_down).items() if one not in gone}
    best = sorted(final, key=lambda one: (-final[one], one))[:k]
    found = scene.found(wanted, k, scene.algorithms[number % len(scene.algorithms)], turned_down=turned_down)
    assert dict(zip(found.item_ids, found.scores, strict=True)) == pytest.approx(
        {one: final[one] for one in found.item_ids}, abs=1e-6
    )
    assert found.certificate is not None
    if found.certificate.kind == "exact":
        assert found.scores == pytest.approx([final[one] for one in best], abs=1e-6)
    elif found.certificate.gap is not None and found.item_ids:
        left_out = [score for one, score in final.items() if one not in found.item_ids]
        assert max(left_out, default=-1) <= found.scores[-1] + found.certificate.gap + 1e-6


@pytest.mark.parametrize("is_changed", [False, True], ids=["as trained", "one withdrawn, one new"])
@pytest.mark.parametrize("pairs", [(2, 2), (1, 1)], ids=["mixture", "dot"])
def test_reranking_a_pool_gives_the_order_of_the_fused_answer_with_its_proof(
    pairs: tuple[int, int], is_changed: bool
) -> None:
    scene, wanted = Scene(*pairs), ItemFilter(seen_item_ids=["i03", "i17", "i30"], exclude_seen=True)
    if is_changed:
        scene.replace(scene.found(wanted).item_ids[0])
    full, pool = (scene.found(wanted, stage=stage) for stage in (Stage.FULL, Stage.FIRST))
    rerank = Rerank(catalogue=scene.catalogue, metrics=RerankerMetrics(CollectorRegistry()))
    ranked = rerank.rank_all(
        [
            RerankQuery(
                query=scene.query, model_version="m", candidate_item_ids=pool.item_ids, bound=pool.bound, k=10,
                filter=wanted, index_version=pool.served.name, votes=pool.votes or (),
                model_share=Voting(scene.base, None).model_share,
            )
        ]
    )[0]  # fmt: skip
    assert (ranked.item_ids, ranked.certificate.kind) == (full.item_ids, "exact")
    assert ranked.scores == pytest.approx(full.scores)


@pytest.mark.parametrize("stage", list(Stage))
def test_without_neighbours_seen_items_change_no_bit_of_an_answer(stage: Stage) -> None:
    scene = Scene(2, 2, with_neighbours=False)
    plain, told = (
        scene.found(ItemFilter(seen_item_ids=seen, exclude_seen=False), stage=stage) for seen in ((), ("i03", "i17"))
    )
    top = scene.catalogue.index.version.search(scene.query, 10, ItemFilter(), algorithm="exact")
    if stage is Stage.FULL:
        assert (plain.item_ids, plain.scores) == (list(top.item_ids[0]), top.scores[0].tolist())
    assert (told.item_ids, told.scores, told.votes) == (plain.item_ids, plain.scores, None)
    assert (told.bound, told.certificate) == (plain.bound, plain.certificate)


@pytest.mark.parametrize("stage", list(Stage))
def test_what_was_turned_down_is_left_out_and_nothing_like_it_is_voted_for(stage: Stage) -> None:
    scene, took, against = Scene(2, 2), ["i17", "i30"], "i03"

    def votes(*seen: str, turned_down: Sequence[str] = ()) -> dict[str, float]:
        found = scene.found(ItemFilter(seen_item_ids=seen, exclude_seen=True), X, stage=stage, turned_down=turned_down)
        return dict(zip(found.item_ids, found.votes or [], strict=True))

    assert max(votes(against).values()) == 1
    assert set(votes(against, turned_down=[against]).values()) == {0}
    before, after = votes(*took), votes(against, *took, turned_down=[against, "unknown"])
    assert after.keys() == before.keys() - {against}
    if before[against] < 1:
        assert after == pytest.approx({one: before[one] for one in after})


def test_new_items_have_no_vote_and_withdrawn_ones_are_not_answered() -> None:
    scene = Scene(2, 2)
    wanted = ItemFilter(seen_item_ids=["i03"], exclude_seen=True)
    best = scene.found(wanted).item_ids[0]
    scene.replace(best)
    for stage in Stage:
        found = scene.found(wanted, k=X, stage=stage)
        assert best not in found.item_ids
        assert dict(zip(found.item_ids, found.votes or [], strict=True))["new"] == 0


@pytest.mark.parametrize("remembered", [None, 0.5])
def test_an_explanation_has_the_vote_of_the_answer(remembered: float | None) -> None:
    scene, seen = Scene(2, 2), ["i03", "i17"]
    scene.search._votes = Voting(scene.base, None if remembered is None else _Memory(remembered))  # type: ignore[arg-type]
    found = scene.found(ItemFilter(seen_item_ids=seen, exclude_seen=True), k=X)
    for item_id, score, vote in zip(found.item_ids, found.scores, found.votes or [], strict=True):
        asked = VotesQuery(query=scene.query, model_version="m", item_id=item_id, seen_item_ids=seen)
        explained = scene.search.explain_votes(asked)
        assert explained.vote == pytest.approx(vote)
        s, share = scene.s[IDS.index(item_id)], explained.model_share
        assert score == pytest.approx(share * s + (1 - share) * vote, abs=1e-6)
    near = scene.base.neighbours
    assert near is not None
    assert explained.model_share == pytest.approx(near.shape.model_share * (remembered or 1.0))


def test_votes_are_the_strongest_of_the_last_items_and_counted_in_bytes_per_item() -> None:
    rng = np.random.default_rng(1)
    neighbours = make_neighbours(rng, 600, num_neighbours=100)
    rows, votes = neighbours.votes(np.arange(200), np.arange(5))
    assert len(rows) == len(votes) == MAX_VOTED
    assert (votes[0], list(votes)) == (1.0, sorted(votes, reverse=True))
    assert not set(rows.tolist()) & set(range(5))
    np.testing.assert_array_equal(rows, neighbours.votes(np.arange(WINDOW), np.arange(5))[0])
    assert len(neighbours.votes([], [])[0]) == 0
    with_them, without = (Scene(2, 2, with_neighbours=wanted).search.info.bytes_per_item for wanted in (True, False))
    near = MIXTURE.base.neighbours
    assert near is not None
    assert with_them - without == pytest.approx(8 * near.shape.num_neighbours)


class _Memory:
    """A memory in which three items are voted for."""

    def __init__(self, model_share: float) -> None:
        self.model_share = model_share

    def __len__(self) -> int:
        return 3

    def of(self, queries: QueryStates) -> list[dict[str, float]]:
        return [{"i01": 0.5, "i02": -0.25, "i30": 0.125} for _ in range(len(queries))]

    def explain(self, query: QueryStates, item_id: str, index_version: str) -> ItemVotes:
        vote = self.of(query)[0].get(item_id, 0.0)
        return ItemVotes(
            vote=vote, num_neighbours=3, model_share=self.model_share, voters=(), index_version=index_version
        )


def test_a_shards_votes_are_the_wholes_of_its_items() -> None:
    base, shards = MIXTURE.base, [Shard(number, 3) for number in range(3)]
    parts = [Voting(base.part(shard.rows(base.rows.strings)), None) for shard in shards]
    for seen in (["i03"], ["i07", "i01", "nowhere"], IDS[:30], []):
        wanted = ItemFilter(seen_item_ids=seen)
        asked = SearchQuery(query=MIXTURE.query, model_version="m", k=1, stage=Stage.FULL, filter=wanted)
        (whole,), *found = [one.of(MIXTURE.query, [asked]) or [] for one in (Voting(base, None), *parts)]
        assert [
            [{item_id: vote for item_id, vote in whole.items() if shard.holds(item_id)}] for shard in shards
        ] == found
