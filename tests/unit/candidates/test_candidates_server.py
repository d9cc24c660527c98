"""The candidates process over real gRPC on loopback, from a real bundle on disk."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, common_pb2
from prometheus_client import CollectorRegistry
from retrieval_scene import half, make_bundle, make_queries, state_fields
from serving_scene import served

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import parse_algorithm
from services.algorithms.items.catalogue import required_bytes
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import QueryStates
from services.candidates.bootstrap import load_catalogue, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.handlers import Choice
from services.candidates.metrics import CandidatesMetrics
from services.candidates.on_device import DeviceBuild
from services.candidates.server import CandidatesServicer
from services.platform.config import ConfigError

FIRST, FULL = candidates_pb2.STAGE_FIRST, candidates_pb2.STAGE_FULL


class Running:
    """A served bundle, its stub, and the exact scores of one query."""

    def __init__(self, bundle: Bundle, stub: Any, registry: CollectorRegistry) -> None:
        self.bundle, self.stub, self.registry = bundle, stub, registry
        head = bundle.manifest.head
        self.queries = half(
            make_queries(
                np.random.default_rng(5), 6, head.num_query_components, head.num_item_components, head.component_width
            )
        )
        self.exact = mol_scores_reference(self.queries, bundle.item_states, bundle.pair_gate).numpy()

    def request(self, query: int = 0, **fields: Any) -> Any:
        state = common_pb2.QueryState(**state_fields(self.queries, self.bundle.model_version, query))
        return candidates_pb2.SearchRequest(**{"query_state": state, "k": 10, "stage": FULL, **fields})

    def best(self, query: int = 0, *, k: int, rows: list[int] | None = None) -> list[str]:
        rows = list(range(60)) if rows is None else rows
        order = sorted(rows, key=lambda row: (-self.exact[query][row], f"item-{row}"))
        return [f"item-{row}" for row in order[:k]]


async def serving(path: Path, shape: tuple[int, int], **changes: Any) -> AsyncIterator[Running]:
    bundle = make_bundle(path, p_q=shape[0], p_x=shape[1])
    settings = CandidatesSettings(
        port=0, metrics_port=0, bundle=path, **{"algorithms": "brute_force top_k_avg(15)", **changes}
    )
    registry = CollectorRegistry()
    search = make_live(settings, load_catalogue(settings), CandidatesMetrics(registry)).search
    add = candidates_pb2_grpc.add_CandidatesServiceServicer_to_server
    async with served("candidates", settings, add, CandidatesServicer(search), registry) as channel:
        yield Running(bundle, candidates_pb2_grpc.CandidatesServiceStub(channel), registry)
    await search.close()


class DearBruteForce(Choice):
    def took(self, algorithm: str, seconds: float) -> None:
        super().took(algorithm, 10.0 if algorithm == "brute_force" else seconds)


async def test_a_search_that_names_no_algorithm_gets_one_that_its_deadline_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.candidates.handlers.Choice", DearBruteForce)
    async for scene in serving(tmp_path / "bundle", (4, 2)):
        assert (await scene.stub.Search(scene.request())).algorithm == "brute_force"
        assert (await scene.stub.Search(scene.request(), timeout=30)).algorithm == "top_k_avg(15)"
        assert (await scene.stub.Search(scene.request(algorithm="brute_force"), timeout=30)).algorithm == "brute_force"
        assert (await scene.stub.Search(scene.request(), timeout=200)).algorithm == "brute_force"


class DearExact(Choice):
    """Costs in seconds, whatever was measured."""

    exact_s = 10.0

    def took(self, algorithm: str, seconds: float) -> None:
        super().took(algorithm, self.exact_s if algorithm == "exact" else 0.001)


async def test_an_answer_goes_deeper_until_its_gap_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.candidates.handlers.Choice", DearExact)
    async for scene in serving(tmp_path / "bundle", (4, 2), algorithms="exact top_k_avg(15)"):
        answer = await scene.stub.Search(scene.request(max_gap=0.0))
        assert answer.algorithm == "exact"
        assert list(answer.item_ids) == scene.best(k=10)
        assert answer.certificate.kind == common_pb2.Certificate.KIND_EXACT
        # What the first attempt took is in the answer.
        assert [one.name for one in answer.passes][:4] == ["first_stage", "full", "float64", "delta"]
        assert len(answer.passes) > 6
        labels = {"algorithm": "top_k_avg(15)", "outcome": "not_proven"}
        assert scene.registry.get_sample_value("freshet_candidates_gaps_total", labels) == 1
        labels = {"algorithm": "exact", "outcome": "proven"}
        assert scene.registry.get_sample_value("freshet_candidates_gaps_total", labels) == 1
        # Where the time left does not allow it, and where another one is named: what that one proves.
        for answer in (
            await scene.stub.Search(scene.request(max_gap=0.0), timeout=5),
            await scene.stub.Search(scene.request(max_gap=0.0, algorithm="top_k_avg")),
        ):
            assert answer.algorithm == "top_k_avg(15)"
            assert answer.certificate.kind != common_pb2.Certificate.KIND_EXACT
        # A pool whose bound proves something is one by s.
        assert (await scene.stub.Search(scene.request(stage=FIRST, max_gap=0.0))).algorithm == "exact"
        assert (await scene.stub.Search(scene.request(stage=FIRST))).algorithm == "exact"
        short = await scene.stub.Search(scene.request(stage=FIRST, max_gap=0.0), timeout=5)
        assert short.algorithm == "top_k_avg(15)"


async def test_what_does_not_prove_a_gap_is_tried_no_more_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.candidates.handlers.Choice", DearExact)
    monkeypatch.setattr(DearExact, "exact_s", 0.01)
    async for scene in serving(tmp_path / "bundle", (4, 2), algorithms="top_k_avg(15) exact"):
        for _ in range(60):
            answer = await scene.stub.Search(scene.request(max_gap=0.0))
            assert list(answer.item_ids) == scene.best(k=10)
            assert answer.algorithm == "exact"
        labels = {"algorithm": "top_k_avg(15)", "outcome": "not_proven"}
        tried = scene.registry.get_sample_value("freshet_candidates_gaps_total", labels)
        assert tried is not None
        assert 1 <= tried < 20


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async for scene in serving(tmp_path / "bundle", (4, 2)):
        yield scene


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_full_search_is_the_exact_top_k_and_says_so(running: Running) -> None:
    answer = await running.stub.Search(running.request())
    assert list(answer.item_ids) == running.best(k=10)
    assert list(answer.scores) == pytest.approx(sorted(running.exact[0], reverse=True)[:10])
    assert answer.certificate.kind == common_pb2.Certificate.KIND_EXACT
    assert not answer.HasField("bound")
    assert answer.model_version == running.bundle.model_version
    assert answer.index_version.startswith(running.bundle.model_version + ".")
    assert answer.search_ms > 0


async def test_first_stage_bounds_everything_left_out(running: Running) -> None:
    for algorithm in ("brute_force", "top_k_avg"):
        answer = await running.stub.Search(running.request(stage=FIRST, algorithm=algorithm))
        left_out = [running.exact[0][row] for row in range(60) if f"item-{row}" not in answer.item_ids]
        assert len(answer.item_ids) == 10
        if answer.HasField("bound"):
            assert max(left_out) <= answer.bound
        assert answer.HasField("bound") or algorithm == "top_k_avg"
        assert not answer.HasField("certificate")


async def test_an_answer_says_which_algorithm_made_it_and_where_its_time_went(running: Running) -> None:
    for asked in ("top_k_avg(15)", "top_k_avg"):
        answer = await running.stub.Search(running.request(algorithm=asked))
        assert answer.algorithm == "top_k_avg(15)"
        assert [one.name for one in answer.passes] == ["first_stage", "full", "float64", "delta"]
        assert [one.items_touched for one in answer.passes][:2] == [60, 15]
        assert 10 <= answer.passes[2].items_touched <= 15
        assert answer.passes[3].items_touched == 0
        assert all(one.milliseconds > 0 for one in answer.passes)
    assert (await running.stub.Search(running.request())).algorithm == "brute_force"


async def test_a_bare_name_that_two_loaded_algorithms_share_is_refused(tmp_path: Path) -> None:
    async for scene in serving(tmp_path / "bundle", (4, 2), algorithms="top_k_avg(15) top_k_avg(30)"):
        code, details = await refused(scene.stub.Search(scene.request(algorithm="top_k_avg")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "empty or one of ['top_k_avg(15)', 'top_k_avg(30)']" in details


async def test_concurrent_searches_each_get_their_own_answer(running: Running) -> None:
    deny = common_pb2.Filter(deny_categories=["Drama"])
    requests = [
        running.request(query % 6, k=5 + query % 2, **({"filter": deny} if query % 3 else {})) for query in range(48)
    ]
    answers = await asyncio.gather(*(running.stub.Search(request) for request in requests))
    no_drama = [row for row in range(60) if row % 4 != 2]
    for query, answer in enumerate(answers):
        wanted = running.best(query % 6, k=5 + query % 2, rows=no_drama if query % 3 else None)
        assert list(answer.item_ids) == wanted
    batches = running.registry.get_sample_value("freshet_candidates_batch_searches_count")
    assert batches is not None
    assert batches < 48


async def test_index_info_and_metrics_tell_bytes_per_item(running: Running) -> None:
    info = await running.stub.GetIndexInfo(candidates_pb2.GetIndexInfoRequest())
    assert (info.algorithm, info.num_items) == ("brute_force", 60)
    added = {one.name: one.added_bytes_per_item for one in info.algorithms}
    assert list(added) == ["brute_force", "top_k_avg(15)"]
    # Components 2 x 8 and gate 8 in float32; the buffer of 256 new rows and hashes; and ids, hashes, categories and
    # masks.
    known = 4 * (16 + 8) + 256 * (4 * (16 + 8) + 8) / 60 + sum(added.values())
    assert known + 40 < info.bytes_per_item < known + 200
    assert added["brute_force"] == 0
    # Means of 8 values at the least in half precision.
    assert 2 * 8 <= added["top_k_avg(15)"] <= 4 * 9 + 8
    assert running.registry.get_sample_value("freshet_candidates_bytes_per_item") == info.bytes_per_item
    await running.stub.Search(running.request())
    for stage in ("queue", "full", "float64", "delta"):
        assert running.registry.get_sample_value("freshet_candidates_stage_seconds_count", {"stage": stage}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 0}, "k=0 allowed: 1-10000"),
        ({"k": 10**6}, "k=1000000 allowed: 1-10000"),
        ({"stage": candidates_pb2.STAGE_UNSPECIFIED}, "stage=0 allowed: STAGE_FIRST or STAGE_FULL"),
        ({"stage": 9}, "stage=9 allowed"),
        ({"algorithm": "magic"}, "algorithm='magic' allowed: empty or one of ['brute_force', 'top_k_avg(15)']"),
        ({"max_gap": -0.1}, "max_gap=-0.1 allowed: a finite number, at least 0"),
        ({"max_gap": float("nan")}, "max_gap=nan allowed: a finite number, at least 0"),
        ({"max_gap": float("inf")}, "max_gap=inf allowed: a finite number, at least 0"),
        ({"seen_item_ids": ["x"] * 20_001}, "len(seen_item_ids)=20001 allowed: 0-20000"),
    ],
)
async def test_a_bad_request_is_refused_by_name(running: Running, fields: dict, message: str) -> None:
    code, details = await refused(running.stub.Search(running.request(**fields)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


def _changed(queries: QueryStates, change: str) -> dict[str, Any]:
    fields = state_fields(queries, "")
    nan = np.full(8, np.nan, np.float16).tobytes()
    return {
        "nan": {**fields, "components": nan * 4},
        "infinite gate": {**fields, "gate": np.full(8, np.inf, np.float16).tobytes()},
        "long": {**fields, "components": (2 * queries.components[:1]).astype("<f2").tobytes()},
        "short": {**fields, "components": fields["components"][:-2]},
        "odd gate": {**fields, "gate": fields["gate"][:-1]},
        "no components": {**fields, "num_components": 0},
        "no width": {**fields, "component_width": 0},
        "other width": {**fields, "num_components": 8, "component_width": 4},
        "other gate": {**fields, "gate": fields["gate"][:-2]},
        "no gate": {**fields, "gate": b""},
        "empty": {},
    }[change]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nan", "query_state: components holds NaN or infinite values"),
        ("infinite gate", "query_state: gate holds NaN or infinite values"),
        ("long", "query_state: components: row 0, component 0 has length 1.99993; allowed: at most 1.001"),
        ("short", "components holds 62 bytes; 4 x 8 need 64"),
        ("odd gate", "gate holds 15 bytes"),
        ("no components", "num_components=0 allowed"),
        ("no width", "component_width=0 allowed"),
        ("other width", "query components have width 4 but item components have width 8"),
        ("other gate", "query gate has 7 pairs; expected 8"),
        ("no gate", "query gate is absent but the items' gate is present"),
        ("empty", "num_components=0 allowed"),
    ],
)
async def test_a_bad_query_state_is_refused_by_name(running: Running, change: str, message: str) -> None:
    fields = {**_changed(running.queries, change), "model_version": running.bundle.model_version}
    code, details = await refused(running.stub.Search(running.request(query_state=common_pb2.QueryState(**fields))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


async def test_a_state_of_another_model_fails_the_precondition_naming_both(running: Running) -> None:
    state = common_pb2.QueryState(**state_fields(running.queries, "0123456789abcdef"))
    code, details = await refused(running.stub.Search(running.request(query_state=state)))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "0123456789abcdef" in details
    assert running.bundle.model_version in details


def test_a_model_beyond_the_memory_limit_is_refused_naming_both_values(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", count=12000)
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=bundle.path, max_memory_mb=1)
    needed = required_bytes(bundle.manifest) / (1 << 20)
    with pytest.raises(MemoryError, match=rf"12000 items needs {needed:.1f} MiB; allowed: 1.0 MiB"):
        load_catalogue(settings)


def test_every_algorithm_can_be_loaded_and_answers(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    names = "exact top_k_avg(20) top_k_per_embedding(5) combined_top_k(5,20) exact_low_precision"
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=bundle.path, algorithms=names)
    search = make_live(settings, load_catalogue(settings), CandidatesMetrics(CollectorRegistry())).search
    assert list(search.info.added_bytes_per_item) == names.split()
    # The lists of component pairs are of the shared states.
    assert [name for name, added in search.info.added_bytes_per_item.items() if added <= 0] == [
        "top_k_per_embedding(5)"
    ]


def test_an_algorithm_that_the_model_cannot_have_is_refused_with_the_setting(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=bundle.path, algorithms="quantized(5)")
    with pytest.raises(ConfigError, match=r"FRESHET_CANDIDATES_ALGORITHMS='quantized\(5\)': items make 8 pairs"):
        make_live(settings, load_catalogue(settings), CandidatesMetrics(CollectorRegistry()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_a_card_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=bundle.path, device="cuda")
    with pytest.raises(ConfigError, match="FRESHET_CANDIDATES_DEVICE='cuda' but PyTorch sees no CUDA card here"):
        make_live(settings, load_catalogue(settings), CandidatesMetrics(CollectorRegistry()))


async def test_searches_are_answered_from_a_torch_device(tmp_path: Path) -> None:
    # The same code that a card runs, on PyTorch's own CPU: tests/gpu asks a card.
    bundle = make_bundle(tmp_path / "bundle")
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=bundle.path)
    base = load_catalogue(settings)
    names = ["exact", "top_k_avg(60)", "top_k_per_embedding(60)", "combined_top_k(60,60)"]
    build = DeviceBuild([parse_algorithm(name) for name in names], torch.device("cpu"))
    catalogue = LiveCatalogue(base, build=build)
    queries = half(make_queries(np.random.default_rng(5), 1, 4, 2, 8))
    exact = mol_scores_reference(queries, bundle.item_states, bundle.pair_gate).numpy()[0]
    assert build.copied_bytes_per_item * base.num_items >= bundle.item_states.components.nbytes
    for name in names:
        answer = catalogue.index.version.search(queries, 5, algorithm=name)
        assert list(answer.item_ids[0]) == [f"item-{row}" for row in np.argsort(-exact)[:5]]


def test_a_card_has_searched_each_way_before_the_first_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compile at a call's first kind: seconds, which a first user with a filter would wait."""
    asked: list[tuple[int, bool]] = []
    searched = BruteForce.search

    def search(index: BruteForce, queries: QueryStates, k: int, allowed: Any = None) -> Any:
        asked.append((len(queries), allowed is not None))
        return searched(index, queries, k, allowed)

    monkeypatch.setattr(BruteForce, "search", search)
    base = load_catalogue(CandidatesSettings(port=0, metrics_port=0, bundle=make_bundle(tmp_path / "bundle").path))
    build = DeviceBuild([parse_algorithm("brute_force")], torch.device("cpu"))
    catalogue = LiveCatalogue(base, build=build)
    assert asked[:4] == [(1, False), (1, True), (33, False), (33, True)]
    asked.clear()
    catalogue.index.merge()
    assert (33, True) not in asked


def test_algorithms_beyond_the_memory_limit_are_refused_naming_both_values(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", count=3000)
    megabytes = -(-required_bytes(bundle.manifest) >> 20) + 1
    many = " ".join(f"top_k_avg({size})" for size in range(1, 200))
    settings = CandidatesSettings(port=0, metrics_port=0, bundle=bundle.path, max_memory_mb=megabytes, algorithms=many)
    with pytest.raises(MemoryError, match=rf"3000 items with top_k_avg\(1\) .* allowed: {megabytes}.0 MiB"):
        make_live(settings, load_catalogue(settings), CandidatesMetrics(CollectorRegistry()))


def test_a_damaged_bundle_is_refused(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    path = bundle.path / "item_states.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"item_states\.safetensors has sha256"):
        load_catalogue(CandidatesSettings(port=0, metrics_port=0, bundle=bundle.path))
