"""The comparison at equal bits on a small set whose answers are known, and the embedding sets' edges."""

import numpy as np
import pytest
from embedding_scene import clustered

from services.offline.evaluation.common.embeddings import EmbeddingSet, EmbeddingSource, sift
from services.offline.evaluation.quantization.codes import (
    FAISS_PQ,
    OURS,
    UNROTATED,
    Rate,
    compare,
    summary,
)

pytest.importorskip("faiss", reason="faiss is an optional extra")

ALL = clustered(1_400, 24, 0)
SMALL = EmbeddingSet(name="clusters", items=ALL[:1_000], queries=ALL[1_000:1_200])


def test_at_equal_bits_the_score_aware_codes_have_the_lower_loss_and_error() -> None:
    rows = {row["algorithm"]: row for row in compare(SMALL, Rate(num_subspaces=6, code_bits=4))}
    assert {row["bits"] for row in rows.values()} == {24}
    for ours in (OURS, UNROTATED):
        assert rows[ours]["score_aware_loss"] < rows[FAISS_PQ]["score_aware_loss"]
        assert rows[ours]["relative_error"] < rows[FAISS_PQ]["relative_error"]
    for row in rows.values():
        assert 0 <= row["recall_1_at_1"] <= row["recall_1_at_10"] <= row["recall_1_at_100"] <= 1


def test_codes_that_reproduce_every_item_find_every_best_one() -> None:
    few = EmbeddingSet(name="few", items=SMALL.items[:16], queries=SMALL.queries)
    (row,) = compare(few, Rate(num_subspaces=1, code_bits=4), methods=(OURS,))
    assert row["recall_1_at_1"] == 1
    assert row["relative_error"] < 1e-3
    assert row["score_aware_loss"] < 1e-6


def test_items_with_equal_codes_share_their_rank() -> None:
    same = EmbeddingSet(name="same", items=np.repeat(SMALL.items[:1], 101, axis=0), queries=SMALL.queries)
    (row,) = compare(same, Rate(num_subspaces=1, code_bits=4), methods=(OURS,))
    # The best stands at rank 50 of 101 equals: not in the first ten, in the first hundred.
    assert (row["recall_1_at_10"], row["recall_1_at_100"]) == (0, 1)


def test_rows_of_several_seeds_become_one_with_its_spread() -> None:
    rows = [
        {"kind": "rate", **row}
        for seed in (0, 1)
        for row in compare(SMALL, Rate(num_subspaces=6, code_bits=4), methods=(OURS,), seed=seed)
    ]
    (joined,) = summary(rows)
    values = [row["recall_1_at_10"] for row in rows]
    assert joined["seeds"] == 2
    assert joined["recall_1_at_10"] == pytest.approx(np.mean(values))
    assert joined["recall_1_at_10_spread"] == pytest.approx(max(values) - min(values))
    assert joined["threshold"] == rows[0]["threshold"]


def test_real_sets_are_split_without_a_shared_row() -> None:
    source = EmbeddingSource()
    try:
        found = sift(source, seed=0)
    except ValueError as error:
        pytest.skip(str(error))
    assert found.items.shape == (4_000, 128)
    assert found.queries.shape == (500, 128)
    assert not {row.tobytes() for row in found.queries} & {row.tobytes() for row in found.items}
