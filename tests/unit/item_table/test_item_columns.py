"""Columns of strings, ids and categories answer as Python's own lists and dictionaries do."""

import gc
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from services.algorithms.item_table import strings as strings_module
from services.algorithms.item_table.categories import Categories, CategoryLists
from services.algorithms.item_table.file import read_items
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.item_table.strings import Strings, joined
from services.offline.bundles.model import write_items

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=40)
ids = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), unique=True, max_size=40)
names = st.lists(st.lists(st.sampled_from(["a", "b", "ä", "long name"]), max_size=5), max_size=20)


@pytest.fixture(autouse=True, params=[3, 65_536], ids=["small slices", "one slice"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strings_module, "_DECODED", request.param)
    monkeypatch.setattr(strings_module, "_PADDED_BYTES", request.param)


@given(given=st.lists(st.text("\0a\u00e9", max_size=3), max_size=8))
def test_a_column_ascends_as_its_strings_do(given: list[str]) -> None:
    assert Strings.of(given).is_ascending() == all(a < b for a, b in pairwise(given))
    assert Strings.of(sorted(set(given))).is_ascending()


@given(given=texts, data=st.data())
def test_a_column_is_the_list_of_its_strings(given: list[str], data: st.DataObject) -> None:
    column = Strings.of(given)
    assert list(column) == given
    assert column == given
    assert [column[row] for row in range(len(given))] == given
    assert [column[row] for row in range(-len(given), 0)] == given
    assert column[1:7:2] == given[1:7:2]
    assert column.lengths.tolist() == [len(one.encode()) for one in given]
    assert column.is_ascending() == all(a < b for a, b in pairwise(given))
    rows = data.draw(st.lists(st.integers(0, len(given) - 1), max_size=50)) if given else []
    assert column.take(rows) == [given[row] for row in rows]
    assert list(column.taken(rows)) == [given[row] for row in rows]
    assert list(joined([column, column.taken(rows), Strings.of(())])) == [*given, *(given[row] for row in rows)]
    assert Strings.from_tensors(column.tensors("x"), "x") == column


def test_a_row_that_there_is_not_is_an_index_error() -> None:
    for row in (2, -3):
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            Strings.of(["a", "b"])[row]


WRONG = {
    "ends that decrease": (b"abc", [2, 1, 3], "string 1 ends at 1, before string 0"),
    "ends beyond the data": (b"abc", [1, 4], "3 bytes that end at 4"),
    "ends before the data's": (b"abc", [1, 2], "3 bytes that end at 2"),
    "no UTF-8": (b"ab\xff", [1, 3], "string 1 is not UTF-8"),
    "a character cut in two": ("aé".encode(), [2, 3], "string 0 is not UTF-8"),
}


@pytest.mark.parametrize(("data", "ends", "message"), WRONG.values(), ids=WRONG)
def test_columns_that_cannot_be_are_refused_by_row(data: bytes, ends: list[int], message: str) -> None:
    tensors = {"x": np.frombuffer(data, np.uint8), "x_ends": np.array(ends, np.int64)}
    with pytest.raises(ValueError, match=f"x: .*{message}"):
        Strings.from_tensors(tensors, "x")


@given(given=ids, asked=ids)
def test_ids_are_found_as_in_a_dictionary(given: list[str], asked: list[str]) -> None:
    column, known = ItemIds.of(given), {one: row for row, one in enumerate(given)}
    asked = [*asked, *given[::2]]
    assert dict(column) == known
    assert [column.get(one, -1) for one in asked] == [known.get(one, -1) for one in asked]
    assert [one in column for one in asked] == [one in known for one in asked]
    assert column.find(asked).tolist() == [known.get(one, -1) for one in asked]
    with pytest.raises(KeyError):
        column["none of them, for it is too long"]
    assert column.get("\ud800") is None
    assert column.find(["\ud800"]).tolist() == [-1]
    hashes = [xxh3_64_intdigest(one.encode()) for one in given]
    hashes = [one - 2**64 if one >= 2**63 else one for one in hashes]
    assert column.hashes.tolist() == hashes
    assert ItemIds(column.strings).hashes.tolist() == hashes
    parts = (column.hashes, *column.by_hash)
    assert column.nbytes == sum(part.nbytes for part in parts) == 20 * len(given)
    again = ItemIds(column.strings, column.hashes)
    assert again.find(asked).tolist() == column.find(asked).tolist()
    others = list(dict.fromkeys(asked))
    assert column.rows_of(ItemIds.of([one for one in others if one])).tolist() == [
        known.get(one, -1) for one in others if one
    ]
    for count in range(1, len(given) + 1):
        some = column.first(count)
        assert (list(some), some.hashes.tolist()) == (given[:count], hashes[:count])
        assert some.find(given).tolist() == [row if row < count else -1 for row in range(len(given))]


@given(given=ids)
def test_the_order_of_ids_is_that_of_strings(given: list[str]) -> None:
    assert Strings.of(given).order().tolist() == sorted(range(len(given)), key=given.__getitem__)


def test_what_nobody_holds_is_freed_without_a_collection() -> None:
    """A merge leaves a segment of millions of ids behind."""
    column = ItemIds.of(["a", "b"])
    assert [column.get("b"), column.get("c", -1)] == [1, -1]
    there = weakref.ref(column)
    gc.disable()
    try:
        del column
        assert there() is None
    finally:
        gc.enable()


def test_ids_of_equal_hash_are_told_apart() -> None:
    given = [f"id-{row}" for row in range(9)]
    column = ItemIds(Strings.of(given), np.array([5] * 4 + [7] * 5))
    rows = column.find(["id-3", "id-0", "id-8", "id-4", "none"], np.array([5, 5, 7, 7, 7]))
    assert rows.tolist() == [3, 0, 8, 4, -1]
    others = ItemIds(Strings.of(["id-4", "none", "id-3", "id-0", "id-8"]), np.array([7, 6, 5, 5, 7]))
    assert column.rows_of(others).tolist() == [4, -1, 3, 0, 8]
    column.check("ids")
    with pytest.raises(ValueError, match="ids holds 'id-1' more than once"):
        ItemIds(Strings.of([*given, "id-1"]), np.full(10, 5)).check("ids")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", ""], "'' of 0 bytes; allowed: 1-128"),
        (["é" * 65], "of 130 bytes"),
        (["a", "b", "a"], "'a' more than once"),
    ],
)
def test_ids_that_cannot_be_are_refused_by_name(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"item_ids holds {message}" if message.startswith("'") else message):
        ItemIds.of(given)


@given(given=names, data=st.data())
def test_categories_are_the_lists_without_repetitions(given: list[list[str]], data: st.DataObject) -> None:
    column = Categories.of(given)
    wanted = [tuple(dict.fromkeys(one)) for one in given]
    assert list(column) == wanted
    assert column == wanted
    assert [column[row] for row in range(len(given))] == wanted
    rows = np.array(data.draw(st.lists(st.integers(0, len(given) - 1), max_size=30)) if given else [], np.int64)
    assert list(column.take(rows)) == [wanted[row] for row in rows]
    codes = data.draw(st.sets(st.integers(0, len(column.names) - 1))) if column.names else set()
    asked = {column.names[code] for code in codes}
    assert column.lists.having(sorted(codes), len(column.names)).tolist() == [bool(asked & {*one}) for one in wanted]
    assert Categories.from_tensors(column.tensors()) == wanted


@pytest.mark.parametrize(
    ("offsets", "codes", "message"),
    [([0, 2, 1, 3], [0, 0, 0], "do not ascend"), ([0, 4], [0, 0, 0], "codes, 3"), ([1, 3], [0, 0, 0], "from 0"),
     ([0, 3], [0, 2, 0], "0 to 2; there are 2 names"), ([0, 1], [-1], "-1 to -1")],
)  # fmt: skip
def test_codes_that_cannot_be_are_refused(offsets: list[int], codes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Categories(CategoryLists(np.array(offsets), np.array(codes, np.int32)), ["a", "b"])


@given(item_ids=ids, data=st.data())
def test_what_is_written_is_read(
    item_ids: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    size = len(item_ids)
    titles = data.draw(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=size, max_size=size))
    categories = data.draw(st.lists(st.lists(st.sampled_from("abc"), unique=True), min_size=size, max_size=size))
    path: Path = tmp_path_factory.mktemp("items") / "items.arrow"
    write_items(path, item_ids, titles, categories, np.arange(size))
    found = read_items(path, size)
    assert list(found.ids) == item_ids
    assert found.titles == titles
    assert found.categories == [tuple(one) for one in categories]
    assert found.counts.tolist() == list(range(size))
