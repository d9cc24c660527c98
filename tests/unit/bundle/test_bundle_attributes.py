"""Typed attributes in a bundle: what comes back of a table, what is refused, and that they are the model's."""

from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bundle_scene import content

from services.algorithms.bundles.model_bundle import ATTRIBUTES, BundleError, load_bundle, write_bundle
from services.offline.datasets.catalogue_file import read_catalogue

IDS = [f"film-{row}" for row in range(5)]
DAY_MS = 24 * 3600 * 1000


def table(folder: Path, **columns: object) -> Path:
    pq.write_table(pa.table({"item_id": ["film-3", "unknown", "film-0"], **columns}), folder / "a.parquet")
    return folder / "a.parquet"


def test_a_tables_columns_are_the_items_attributes(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        price=[3, None, 0],
        exact=[Decimal("1.5"), None, None],
        day=[date(1970, 1, 2), None, date(1969, 12, 31)],
        moment=[datetime(1970, 1, 1, 0, 0, 1), None, None],
        maker=pa.array(["é", "x", None]).dictionary_encode(),
    )
    attributes = read_catalogue(path).attributes_of(IDS)
    plain = write_bundle(tmp_path / "plain", content())
    written = write_bundle(tmp_path / "written", replace(content(), attributes=attributes))
    loaded = load_bundle(tmp_path / "written").attributes
    assert [loaded.of_row(row) for row in range(5)] == [
        {"price": 0.0, "day": -DAY_MS}, {}, {},
        {"price": 3.0, "exact": 1.5, "day": DAY_MS, "moment": 1000, "maker": "é"}, {},
    ]  # fmt: skip
    assert load_bundle(tmp_path / "plain").attributes.kinds == {}
    assert written.manifest.model_version != plain.manifest.model_version
    again = write_bundle(tmp_path / "again", replace(content(), attributes=attributes))
    assert again.manifest.model_version == written.manifest.model_version


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"price": [1.0, float("nan"), 2.0]}, r"row 1: price='nan' allowed: a finite number, or null"),
        ({"maker": ["x", "", None]}, r"row 1: maker='' allowed: 1-128 bytes"),
        ({"flag": [b"x", b"y", None]}, r"column flag is of binary; allowed: numbers, dates or timestamps, and strings"),
        ({"no-name": [1, 2, 3]}, r"attribute 'no-name'; allowed"),
        ({f"a{n}": [1, 2, 3] for n in range(33)}, r"33 attributes; allowed: at most 32"),
    ],
)
def test_a_table_that_no_filter_could_use_is_refused(tmp_path: Path, columns: dict[str, list], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_catalogue(table(tmp_path, **columns))


def test_a_table_without_ids_or_with_one_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"price": [1]}), tmp_path / "a")
    with pytest.raises(ValueError, match="missing: item_id"):
        read_catalogue(tmp_path / "a")
    pq.write_table(pa.table({"item_id": ["a", "b", "a"]}), tmp_path / "a")
    with pytest.raises(ValueError, match="row 2: item_id='a' again, first in row 0"):
        read_catalogue(tmp_path / "a")
    (tmp_path / "a").write_text("item_id\na\n")
    with pytest.raises(ValueError, match="not a Parquet table"):
        read_catalogue(tmp_path / "a")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"price": pa.array([1.0] * 4)}, "4 rows; expected 5"),
        ({"price": pa.array([1] * 5)}, "price is of int64; allowed: double"),
        ({"price": pa.array([float("inf")] * 5)}, "price holds NaN or infinite numbers"),
    ],
)
def test_a_bundle_whose_attributes_are_spoiled_is_refused(tmp_path: Path, written: dict, says: str) -> None:
    attributes = pa.table({"price": pa.array([1.0] * 5)})
    bundle = write_bundle(tmp_path / "b", replace(content(), attributes=attributes))
    pq.write_table(pa.table(written), tmp_path / "b" / ATTRIBUTES)
    with pytest.raises(BundleError, match=says):
        type(bundle)(path=bundle.path, manifest=bundle.manifest).attributes  # noqa: B018
    with pytest.raises(BundleError, match=rf"{ATTRIBUTES} (has|holds) "):
        load_bundle(tmp_path / "b")
