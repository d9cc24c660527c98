"""PEFA on text: recall as defined, choices from training queries alone, and serving equal to the paper's formulas."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.offline.datasets.locate import Locator
from services.offline.evaluation.common.embeddings import EmbeddingSource
from services.offline.evaluation.common.recall import pair_ranks, recalls
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.pefa import report as pefa_text
from services.offline.evaluation.pefa.data import Judged, TextSet, folds, load, sampled
from services.offline.evaluation.pefa.indexes import ServedMemory, ServedVectors, Voted
from services.offline.evaluation.pefa.serving import rows
from services.offline.evaluation.pefa.sweep import ENCODER, Setting, chosen, grid, measured, xs_vectors


def unit_rows(count: int, seed: int, width: int = 12) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def text_set(*, num_documents: int = 120, num_train: int = 200, num_test: int = 40, seed: int = 0) -> TextSet:
    """Documents that their queries resemble a little, and queries of one document that resemble each other more."""
    rng = np.random.default_rng(seed)
    documents = unit_rows(num_documents, seed)
    asked_as = unit_rows(num_documents, seed + 1)

    def judged(count: int, first_twice: bool) -> Judged:
        wanted = rng.integers(0, num_documents, count)
        queries = documents[wanted] + 1.5 * asked_as[wanted] + rng.normal(size=(count, 12)) * 0.5
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
        pairs = np.column_stack([np.arange(count), wanted])
        if first_twice:
            pairs = np.unique(np.concatenate([pairs, [[0, (wanted[0] + 1) % num_documents]]]), axis=0)
        return Judged(queries=queries.astype(np.float32), pairs=pairs)

    return TextSet(
        name="scifact",
        documents=documents,
        train=judged(num_train, True),
        test=judged(num_test, True),
        unseen=np.arange(num_test) % 2 == 0,
        tested_are_trained=False,
    )


def transcribed(data: TextSet, setting: Setting) -> np.ndarray:
    """The paper's formulas on dense matrices, written plainly: scores (B, n)."""
    documents, queries = data.documents.astype(np.float64), data.train.queries.astype(np.float64)
    asked = data.test.queries.astype(np.float64)
    relevance = np.zeros((len(queries), len(documents)))
    relevance[data.train.pairs[:, 0], data.train.pairs[:, 1]] = 1
    if setting.method == "xs":
        sums = relevance.T @ queries
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        shares = np.where(norms > 0, setting.share, setting.share if setting.printed else 1.0)
        return asked @ (shares * documents + (1 - setting.share) * sums / np.where(norms > 0, norms, 1)).T
    similar = asked @ queries.T
    gate = np.zeros_like(similar)
    nearest = np.argsort(-similar, axis=1)[:, : setting.k]
    np.put_along_axis(gate, nearest, 1 / setting.k, axis=1)
    return setting.share * asked @ documents.T + (1 - setting.share) * (gate * similar) @ relevance


def test_ranks_are_places_in_the_sorted_order_with_ties_by_row() -> None:
    scores = np.round(np.random.default_rng(0).normal(size=(300, 50)), 1)
    pairs = np.column_stack([np.arange(300), np.random.default_rng(1).integers(0, 50, 300)])
    order = np.argsort(-scores, axis=1, kind="stable")
    wanted = [int(np.flatnonzero(order[query] == document)[0]) for query, document in pairs]
    assert pair_ranks(scores, pairs).tolist() == wanted


def test_recall_is_the_share_of_a_querys_documents_found() -> None:
    pairs = np.array([[0, 3], [0, 4], [1, 5]])
    found = recalls(np.array([0, 10, 99]), pairs, 2)
    assert found["recall@1"].tolist() == [0.5, 0.0]
    assert found["recall@10"].tolist() == [0.5, 0.0]
    assert found["recall@100"].tolist() == [1.0, 1.0]


def test_a_query_without_documents_and_a_score_of_nan_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 queries have no document"):
        recalls(np.array([0]), np.array([[0, 1]]), 2)
    with pytest.raises(ValueError, match="1 targets have the score NaN"):
        pair_ranks(np.array([[0.1, np.nan]]), np.array([[0, 1]]))


@pytest.mark.parametrize("tested_are_trained", [False, True])
def test_folds_hold_every_query_out_at_most_once_and_share_none(tested_are_trained: bool) -> None:
    data = replace(text_set(), tested_are_trained=tested_are_trained)
    rows_of = {row.tobytes(): number for number, row in enumerate(data.train.queries)}
    seen: list[int] = []
    for fitted, held_out in folds(data, count=5, seed=3):
        out = [rows_of[row.tobytes()] for row in held_out.queries]
        assert len(fitted) + len(held_out) == len(data.train)
        assert not set(out) & {rows_of[row.tobytes()] for row in fitted.queries}
        seen += out
        for query, document in held_out.pairs:  # numbered anew, with their own documents
            assert [out[query], document] in data.train.pairs.tolist()
        if tested_are_trained:
            assert np.isin(held_out.pairs[:, 1], fitted.pairs[:, 1]).all()
    assert len(seen) == len(set(seen))
    assert tested_are_trained or len(seen) == len(data.train)


def test_a_sampled_share_keeps_that_many_pairs_and_no_query_without_one() -> None:
    data = text_set()
    part = sampled(data.train, 0.25, seed=1)
    assert len(part.pairs) == round(0.25 * len(data.train.pairs))
    assert set(part.pairs[:, 0].tolist()) == set(range(len(part)))
    with pytest.raises(ValueError, match=r"share=1\.5; allowed: above 0, at most 1"):
        sampled(data.train, 1.5, seed=1)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(method="xs", share=0.4),
        Setting(method="xs", share=0.4, printed=True),
        Setting(method="xl", share=0.3, k=8),
    ],
    ids=lambda setting: setting.text,
)
def test_measured_recall_is_that_of_the_papers_formulas(setting: Setting) -> None:
    data = text_set(seed=5)
    found = measured(data.documents, data.train, data.test, [setting])[setting]
    expected = recalls(pair_ranks(transcribed(data, setting), data.test.pairs), data.test.pairs, len(data.test))
    for name, values in expected.items():
        assert found[name].tolist() == values.tolist()


def test_the_choice_never_looks_at_test_queries() -> None:
    data = text_set(seed=7)
    tried = grid((0.1, 0.5, 0.9), (2, 8))
    others = Judged(queries=unit_rows(3, 99), pairs=np.array([[0, 1], [1, 2], [2, 3]]))
    replaced = replace(data, test=others, unseen=np.ones(3, dtype=bool))
    assert chosen(data, tried, seed=0) == chosen(replaced, tried, seed=0)


def test_feedback_that_helps_is_chosen_over_the_encoder_alone() -> None:
    data = text_set(seed=8)
    best = chosen(data, grid((0.3, 0.9), (4,)), seed=0)
    found = measured(data.documents, data.train, data.test, [ENCODER, *best.values()])
    for method in ("xs", "xl"):
        gain = found[best[method, False]]["recall@10"].mean() - found[ENCODER]["recall@10"].mean()
        assert gain > 0.05


@pytest.mark.parametrize("algorithm", ["brute_force", "quantized(1)"])
def test_exact_serving_answers_as_the_papers_formulas_rank(algorithm: str) -> None:
    data = text_set(seed=9)
    xs = Setting(method="xs", share=0.4)
    served = ServedVectors(xs_vectors(data.documents, data.train, xs), algorithm=algorithm)
    np.testing.assert_array_equal(
        served.answer(data.test.queries), np.argsort(-transcribed(data, xs), axis=1, kind="stable")[:, :100]
    )
    single = Judged(queries=data.train.queries[1:], pairs=data.train.pairs[data.train.pairs[:, 0] > 0] - [1, 0])
    data = replace(data, train=single)
    xl = Setting(method="xl", share=0.3, k=8)
    base, memory = ServedVectors(data.documents, algorithm=algorithm), ServedMemory(data.train, k=xl.k)
    voted = Voted(data.documents, base, memory, share=xl.share)
    scores, found = transcribed(data, xl), voted.answer(data.test.queries)
    # Remembered queries are in half precision, so neighbours of nearly equal scores may swap.
    got = np.take_along_axis(scores, found, axis=1)
    np.testing.assert_allclose(got, -np.sort(-scores, axis=1)[:, :100], atol=2e-4)


def test_every_index_has_a_row_for_each_method_with_recall_cost_and_size() -> None:
    data = text_set(seed=11)
    settings = {"xs": Setting(method="xs", share=0.4), "xl": Setting(method="xl", share=0.3, k=8)}
    found = rows(data, settings, seed=0, num_timed=2, say=lambda line: None)
    by_index: dict[str, list[str]] = {}
    for row in found:
        by_index.setdefault(row["index"], []).append(row["method"])
        assert 0 <= row["recall@1"] <= row["recall@10"] <= row["recall@100"] <= 1
        assert row["index_bytes"] > 0
    assert set(map(tuple, by_index.values())) == {("encoder", "xs", "xl")}
    exact = {row["method"]: row for row in found if row["index"] == "brute_force"}
    assert exact["xl"]["index_bytes"] > exact["xs"]["index_bytes"] == exact["encoder"]["index_bytes"]


def keep_vectors(source: EmbeddingSource, texts: Sequence[str], vectors: np.ndarray) -> None:
    fingerprint = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    path = source.kept(f"minilm-{fingerprint}.npy")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, vectors)


def small_scifact(folder: Path) -> EmbeddingSource:
    """SciFact's files with 130 abstracts and 60 claims, and kept vectors, so that no encoder is needed."""
    environ = {"FRESHET_DATA": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
    source = EmbeddingSource(locator=Locator(environ=environ))
    made = folder / "data" / "scifact"
    made.mkdir(parents=True)
    ids = [f"d{number}" for number in range(130)]
    texts = [f"text {number} " + 700 * "x" for number in range(130)]
    columns = {"doc_id": ids, "title": [f"title {number}" for number in range(130)], "text": texts}
    pq.write_table(pa.table(columns), made / "corpus.parquet")
    split = ["train"] * 40 + ["validation"] * 20
    claims = [f"claim {number}" for number in range(59)] + ["Claim  0"]  # the last test claim is the first trained one
    queries = {"query_id": [str(number) for number in range(60)], "split": split, "text": claims}
    pq.write_table(pa.table(queries), made / "queries.parquet")
    wanted = [number % 25 for number in range(60)]
    judged = {"query_id": [str(number) for number in range(60)] + ["0"], "doc_id": [ids[row] for row in (*wanted, 99)]}
    pq.write_table(pa.table(judged), made / "qrels.parquet")
    vectors = unit_rows(130, 1, width=384)
    asked = vectors[wanted] + 2 * unit_rows(60, 2, width=384)
    asked /= np.linalg.norm(asked, axis=1, keepdims=True)
    keep_vectors(source, [f"title {row} {text}"[:600] for row, text in enumerate(texts)], vectors)
    keep_vectors(source, claims[:40], asked[:40])
    keep_vectors(source, claims[40:], asked[40:])
    return source


def test_files_become_documents_cut_at_600_characters_and_judged_queries(tmp_path: Path) -> None:
    data = load("scifact", small_scifact(tmp_path))
    assert data.documents.shape == (130, 384)
    assert (len(data.train), len(data.test)) == (40, 20)
    assert data.train.pairs[:3].tolist() == [[0, 0], [0, 99], [1, 1]]
    assert data.unseen.tolist() == [True] * 19 + [False]  # case and spaces make no other query


def test_the_report_and_its_page_have_every_table(tmp_path: Path) -> None:
    request = Request(how="freshet bench pefa", out=tmp_path / "out", quick=True, seed=0)
    report = pefa_text.run(request, names=["scifact"], source=small_scifact(tmp_path))
    tables = {row["table"] for row in report["rows"]}
    assert tables == {"chosen", "sweep", "serving", "share"}
    assert {row["share"] for row in report["rows"] if row["table"] == "share"} == {0.05, 0.1, 0.25, 0.5, 0.75, 0.95}
    assert json.loads((tmp_path / "out" / "pefa.json").read_text())["rows"] == report["rows"]
    page = (tmp_path / "out" / "pefa.md").read_text()
    assert page == pefa_text.page(report).rstrip() + "\n"
    swept = [row for row in report["rows"] if row["table"] == "sweep" and (row["k"], row["lambda"]) == (16, 0.3)]
    (shared,) = (
        row for row in report["rows"] if (row["table"], row["method"], row.get("share")) == ("share", "xl", 0.5)
    )
    assert "| λ | XS | XL, k 16 | XL, k 32 | XL, k 64 |" in page
    assert f" {swept[0]['recall@10']:.3f}, {swept[0]['recall@100']:.3f} |" in page
    assert f"| 50% | {shared['pairs']} |" in page
    assert f" {shared['recall@10']:.3f} | {shared['index_bytes'] / 1e6:.1f} |" in page
