"""A table of items that cannot be served is refused with file, field and what is allowed; what was loaded before goes
on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from bundle_scene import content

from services.algorithms.bundles import tensor_file
from services.algorithms.bundles.model_bundle import ITEMS, Bundle, BundleError, load_bundle
from services.algorithms.bundles.model_manifest import Manifest
from services.algorithms.bundles.sealed_files import MANIFEST, file_entry
from services.offline.bundles.model import write_bundle, write_items

COUNTS = np.arange(5)
TITLES = ["t"] * 5
LISTS = pa.list_(pa.dictionary(pa.int32(), pa.string()))


def with_ids(*item_ids: str) -> Callable[[Path], None]:
    return lambda path: write_items(path, item_ids, TITLES, [()] * 5, COUNTS)


def with_column(name: str, column: pa.Array) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
        table = table.set_column(table.column_names.index(name), name, column)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    return spoil


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


SPOILED = {
    "one id twice": (with_ids("a", "b", "a", "c", "d"), r"item_id holds 'a' more than once"),
    "a long id": (with_ids("a", "b", "c", "d", "x" * 129), r"item_id holds 'x+' of 129 bytes; allowed: 1-128"),
    "no id": (with_ids("a", "b", "", "c", "d"), r"item_id holds '' of 0 bytes; allowed: 1-128"),
    "categories no list": (
        with_column("categories", pa.array(["Drama"] * 5)),
        r"'categories': 'string'.*; expected 5 rows of .*categories \(list of dictionary-coded strings\)",
    ),
    "categories null": (
        with_column("categories", pa.array([["Drama"], None, [], [], []], LISTS)),
        "column categories holds nulls; allowed: none",
    ),
    "hashes of other ids": (
        with_column("id_hash", pa.array(np.arange(5))),
        "item_id has hashes of other ids",
    ),
    "hashes in no order": (
        with_column("id_hash", pa.array([3, 1, 2, 4, 5])),
        "item_id has hashes that do not ascend, or of rows that it lacks",
    ),
    "hashes of rows beyond the last": (
        with_column("id_hash_row", pa.array([0, 1, 2, 3, 5], pa.int32())),
        "item_id has hashes that do not ascend, or of rows that it lacks",
    ),
    "ranks of another order": (
        with_column("popularity_rank", pa.array([0, 1, 2, 3, 4], pa.int32())),
        "popularity_rank is not the inverse of popular_row",
    ),
    "cut short": (cut_short, "not an Arrow file of items"),
    "of more items": (
        lambda path: write_items(path, [*"abcdef"], ["t"] * 6, [()] * 6, np.arange(6)),
        "has 6 rows of .*; expected 5 rows",
    ),
}  # fmt: skip


def spoiled(bundle: Bundle, spoil: Callable[[Path], None], aside: Path) -> None:
    """Other items in the bundle's place, by renaming."""
    aside.write_bytes((bundle.path / ITEMS).read_bytes())
    spoil(aside)
    aside.replace(bundle.path / ITEMS)


def listed(bundle: Bundle) -> list[object]:
    return [list(bundle.item_ids), list(bundle.titles), list(bundle.categories), bundle.item_index["film-3"]]


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("name", SPOILED)
def test_items_that_cannot_be_served_are_refused_and_what_is_loaded_goes_on(
    name: str, is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "LOADED_BYTES", 0 if is_mapped else 1 << 20)
    monkeypatch.setattr(tensor_file, "_mapped", {})
    attributes = pa.table({"price": pa.array([1.0, None, 3.0, 4.0, 5.0])})
    bundle = write_bundle(tmp_path / "b", replace(content(), attributes=attributes))
    before, prices = listed(bundle), [bundle.attributes.of_row(row) for row in range(5)]
    spoil, says = SPOILED[name]
    spoiled(bundle, spoil, tmp_path / "aside")
    # Its manifest says another file; and whoever writes a manifest of it is told what is wrong.
    with pytest.raises(BundleError, match=rf"{ITEMS} (holds \d+ bytes|has sha256 \w+); {MANIFEST} says "):
        load_bundle(bundle.path)
    manifest = Manifest.read(bundle.path / MANIFEST)
    files = manifest.files | {ITEMS: file_entry(bundle.path / ITEMS)}
    other = Bundle(path=bundle.path, manifest=replace(manifest, files=files))
    with pytest.raises(BundleError, match=rf"(?s)b/{ITEMS}(:| has) .*{says}|b/{ITEMS} {says}"):
        other.item_ids  # noqa: B018
    assert (listed(bundle), [bundle.attributes.of_row(row) for row in range(5)]) == (before, prices)
    assert tensor_file.changed_in_place() == ""


def test_the_items_of_another_bundle_are_refused(tmp_path: Path) -> None:
    bundle, other = write_bundle(tmp_path / "b", content()), content(seed=1)
    before = listed(bundle)
    found = write_bundle(tmp_path / "other", replace(other, titles=[f"Film № {row + 1}" for row in range(5)]))
    spoiled(bundle, lambda path: path.write_bytes((found.path / ITEMS).read_bytes()), tmp_path / "aside")
    with pytest.raises(BundleError, match=rf"b/{ITEMS} has sha256 \w+; {MANIFEST} says \w+"):
        load_bundle(bundle.path)
    assert listed(bundle) == before
