"""Users and items come from the files that the caller names, or a message says what is wrong with them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from loadtest.population import Draws, Population, made_up_users, read_items, read_users


def test_a_bundle_folder_gives_items_weighted_by_their_counts(tmp_path: Path) -> None:
    feather.write_feather(pa.table({"item_id": ["a", "b"], "count": [8, 0]}), tmp_path / "items.arrow")
    item_ids, weights = read_items(tmp_path)
    assert item_ids == ["a", "b"]
    assert weights.tolist() == pytest.approx([0.9, 0.1])


def test_a_text_file_gives_ids_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("a\n\n b \n")
    assert read_users(tmp_path / "users.txt") == ["a", "b"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"items\.arrow is not there; name an Arrow or Parquet file with item_id"):
        read_items(tmp_path)


def test_a_table_without_the_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "u.parquet")
    with pytest.raises(ValueError, match="has no column user_id; it has: id"):
        read_users(tmp_path / "u.parquet")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "u.txt").write_text("\n")
    with pytest.raises(ValueError, match="holds no user_id"):
        read_users(tmp_path / "u.txt")


def test_draws_follow_the_weights() -> None:
    population = Population(user_ids=made_up_users(3), item_ids=["a", "b"], item_weights=np.array([0.9, 0.1]))
    draws = Draws(population, np.random.default_rng(0))
    drawn = [draws.draw() for _ in range(10_000)]
    assert sum(item == "a" for _, item in drawn) == pytest.approx(9_000, rel=0.03)
    assert {user for user, _ in drawn} == {"loadtest-0", "loadtest-1", "loadtest-2"}
