"""Item vectors brought from elsewhere: what is read, and what is refused by row and value."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.offline.datasets.item_vectors import read_item_vectors


def written(folder: Path, **columns: Any) -> Path:
    path = folder / "items.parquet"
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), path)
    return path


def test_ids_vectors_titles_and_categories_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path, item_id=["a", "b"], vector=[[1.0, 2], [3, 4]], title=["A", "B"], categories=[["x", "y"], None]
    )
    items = read_item_vectors(path)
    assert items.item_ids == ["a", "b"]
    assert items.vectors.dtype == np.float32
    assert items.vectors.tolist() == [[1, 2], [3, 4]]
    assert (items.titles, items.categories) == (["A", "B"], [["x", "y"], []])


def test_categories_may_be_text_and_nulls_are_no_names(tmp_path: Path) -> None:
    texts = written(
        tmp_path, item_id=["a", "b"], vector=[[1.0, 2], [3, 4]], title=["A", None], categories=["x|y", None]
    )
    assert read_item_vectors(texts).titles == ["A", ""]
    assert read_item_vectors(texts).categories == [["x", "y"], []]
    lists = written(tmp_path, item_id=["a", "b"], vector=[[1.0, 2], [3, 4]], categories=[["x", None], [None]])
    assert read_item_vectors(lists).categories == [["x"], []]


def test_ids_stand_in_for_titles_and_numbers_for_ids(tmp_path: Path) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float16)), 3)
    items = read_item_vectors(written(tmp_path, item_id=[7, 8], vector=vectors))
    assert (items.item_ids, items.titles, items.categories) == (["7", "8"], ["7", "8"], [[], []])
    assert items.vectors.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"item_id": ["a"]}, r"missing: \['vector'\]"),
        ({"item_id": [], "vector": pa.array([], pa.list_(pa.float32()))}, "0 rows; allowed: at least 1 item"),
        ({"item_id": ["a", "b", "a"], "vector": [[1.0]] * 3}, "row 2: item_id='a' again, first in row 0"),
        ({"item_id": [""], "vector": [[1.0]]}, "row 0: item_id=''; allowed: 1-128 bytes"),
        ({"item_id": ["a", None], "vector": [[1.0]] * 2}, "row 1: item_id=''; allowed: 1-128 bytes"),
        ({"item_id": ["x" * 129], "vector": [[1.0]]}, "row 0: item_id='x+'; allowed: 1-128 bytes"),
        ({"item_id": ["a", "b"], "vector": [[1.0, 2], [3]]}, "row 1: vector has 1 values; expected 2 as in row 0"),
        ({"item_id": ["a", "b"], "vector": [[1.0, 2], None]}, "row 1: vector has 0 values; expected 2 as in row 0"),
        ({"item_id": ["a"], "vector": [[]]}, "row 0: vector has 0 values; expected at least 1"),
        ({"item_id": ["a"], "vector": [1.0]}, "column vector has type double; expected a list of numbers"),
        ({"item_id": ["a", "b"], "vector": [[1.0], [float("nan")]]}, "row 1: vector holds NaN or infinite"),
        (
            {"item_id": ["a", "b"], "vector": [[1.0], [7e4]]},
            "row 1: vector has length 70000; allowed: at most 65504",
        ),
        (
            {"item_id": ["a", "b"], "vector": [[1.0], [3e38]]},
            "row 1: vector has length inf; allowed: at most 65504",
        ),
        ({"item_id": ["a"], "vector": [[1.0, None]]}, "1 of the vectors' values are missing"),
    ],
)
def test_what_cannot_be_served_is_refused_by_row_and_value(tmp_path: Path, columns: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_item_vectors(written(tmp_path, **columns))


def test_any_length_but_none_can_be_scaled_to_1(tmp_path: Path) -> None:
    vectors = [[3.0, 4.0], [3e38, 3e38], [0.0, 1e-30]]
    items = read_item_vectors(written(tmp_path, item_id=["a", "b", "c"], vector=vectors), normalize=True)
    np.testing.assert_allclose(items.vectors, [[0.6, 0.8], [0.5**0.5, 0.5**0.5], [0, 1]], rtol=1e-6)
    with pytest.raises(ValueError, match="row 1: a vector of zeros has no direction"):
        read_item_vectors(written(tmp_path, item_id=["a", "b"], vector=[[1.0], [0.0]]), normalize=True)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "items.parquet"
    path.write_text("item_id,vector\n")
    with pytest.raises(ValueError, match="not a Parquet table"):
        read_item_vectors(path)
