"""Sequences without timestamps: the order given is the order kept, and nothing claims to know a time."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.offline.datasets import DatasetUnavailableError, from_columns, load_dataset, read_data, read_sequences
from services.offline.datasets.locate import Locator

# Item ids that neither rise nor fall, a repeat, users out of order, one user without an item.
SEQUENCES = {"user_id": [7, 3, 12, 5], "items": [[30, 2, 30, 1], [2, 1, 30], [], [9]]}


def write(folder: Path, columns: dict[str, object] | None = None, name: str = "sequences.parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(SEQUENCES if columns is None else columns), folder / name)
    return folder / name


def items_of(data, user: str) -> list[str]:
    code = data.user_ids.index(user)
    return [data.item_ids[item] for item in data.items[data.users == code]]


def test_each_user_keeps_the_order_given(tmp_path: Path) -> None:
    data = read_sequences(write(tmp_path / "shop"))
    assert [items_of(data, user) for user in ("7", "3", "5")] == [["30", "2", "30", "1"], ["2", "1", "30"], ["9"]]
    assert data.user_ids == ["3", "5", "7"]
    assert data.timestamps[data.users == 2].tolist() == [0, 1, 2, 3]


def test_a_long_sequence_keeps_its_order_among_many_users(tmp_path: Path) -> None:
    sequences = [[str((user * 37 + place * 101) % 211) for place in range(150)] for user in range(40)]
    path = write(tmp_path, {"user_id": [f"u{user}" for user in range(40)], "items": sequences})
    data = read_sequences(path)
    assert [items_of(data, f"u{user}") for user in range(40)] == sequences


def test_the_source_says_that_there_are_no_times(tmp_path: Path) -> None:
    data = read_sequences(write(tmp_path / "shop").parent)
    assert data.name == "shop"
    assert data.source.endswith("8 events of 3 users with 4 items; order only, no timestamps")
    assert not data.has_times
    assert not data.select(slice(0, 3)).has_times


def test_a_known_name_is_found_like_movielens(tmp_path: Path) -> None:
    write(tmp_path / "amazon-beauty-2014")
    data = load_dataset("amazon-beauty-2014", environ={"FRESHET_DATA": str(tmp_path)}, download=False)
    assert f"in FRESHET_DATA ({tmp_path})" in data.source
    own_folder = {"FRESHET_DATA": str(tmp_path / "amazon-beauty-2014")}
    assert len(load_dataset("amazon-beauty-2014", environ=own_folder, download=False)) == 8


def test_a_known_name_that_is_nowhere_is_never_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DatasetUnavailableError, match=r"lastfm-2k could not be had: .*Put its folder where FRESHET"):
        load_dataset("lastfm-2k", root=tmp_path)
    locator = Locator(environ={"XDG_CACHE_HOME": str(tmp_path)}, publisher_url="no address at all")
    assert locator.from_publisher("lastfm-2k") is None
    assert not locator.tried


def test_any_path_to_such_a_table_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, name="mine.parquet")
    data = load_dataset(path)
    assert (data.name, len(data)) == ("mine", 8)


def test_a_parquet_table_of_events_is_no_sequence_table(tmp_path: Path) -> None:
    path = write(tmp_path, {"user": ["a"], "item": ["x"], "timestamp": [1_700_000_000]}, name="clicks.parquet")
    assert load_dataset(path).has_times


def test_categories_are_the_names_of_the_attributes(tmp_path: Path) -> None:
    path = write(tmp_path)
    write(tmp_path, {"item_id": [30, 2, 1], "attribute_ids": [[5, 6, 5], [], [4]]}, name="items.parquet")
    write(tmp_path, {"attribute_id": [5, 6], "name": ["Soap", "Hand, Foot"]}, name="attributes.parquet")
    data = read_sequences(path)
    assert dict(zip(data.item_ids, data.categories, strict=True)) == {
        "1": (),
        "2": (),
        "9": (),
        "30": ("Soap", "Hand, Foot"),
    }


def test_titles_come_from_the_item_table(tmp_path: Path) -> None:
    path = write(tmp_path)
    write(tmp_path, {"item_id": [30, 2], "title": ["Soap", None]}, name="items.parquet")
    assert read_sequences(path).titles == ["", "", "", "Soap"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1], "items": [[1]]}, r"sequences\.parquet has no column user_id; it has: user, items"),
        ({"user_id": [1], "item": [1]}, r"sequences\.parquet has no column items; it has: user_id, item"),
        ({"user_id": [1], "items": [4]}, r"sequences\.parquet: column items has type int64; expected a list"),
        (
            {"user_id": [1, None], "items": [[1], [2]]},
            r"sequences\.parquet: column user_id in row 2 is missing",
        ),
        ({"user_id": [1, 2], "items": [[1], None]}, r"sequences\.parquet: column items in row 2 is missing"),
        (
            {"user_id": [1, 2], "items": [[1], [2, None]]},
            r"an id of column items in row 2 is missing",
        ),
        ({"user_id": [1, 2, 1], "items": [[1], [2], [3]]}, r"user_id '1' is in rows 1 and 3; give one row per user"),
        ({"user_id": ["a", "b"], "items": [["x"], ["x", ""]]}, r"items='' in row 2 is empty"),
        ({"user_id": ["a", "b\n"], "items": [["x"], ["x"]]}, r"user_id='b\\n' in row 2 holds a control character"),
        ({"user_id": [1], "items": pa.array([[]], pa.list_(pa.int32()))}, r"column items holds no item"),
    ],
)
def test_a_wrong_table_is_refused_by_file_and_column(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    path = write(tmp_path, columns)
    with pytest.raises(ValueError, match=message) as caught:
        read_sequences(path)
    assert str(path) in str(caught.value)
    (finding,) = read_data(path).findings
    assert (finding.severity, finding.what) == ("error", str(caught.value))


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "sequences.parquet").write_text("user_id,items\n")
    with pytest.raises(ValueError, match=r"sequences\.parquet cannot be read as Parquet"):
        load_dataset(tmp_path)


def test_validation_says_that_only_the_order_is_known(tmp_path: Path) -> None:
    findings = {finding.what: finding for finding in read_data(write(tmp_path)).findings}
    assert findings["order only, no timestamps"].severity == "info"
    assert findings["a user takes the same item again later"].count == 1
    assert not [finding for finding in findings.values() if finding.severity == "error"]


def test_the_flag_leaves_the_fingerprint_as_it_was() -> None:
    columns = {
        "users": (pa.array([0, 1, 0]).to_numpy(), ["a", "b"]),
        "items": (pa.array([1, 0, 0]).to_numpy(), ["x", "y"]),
        "timestamps": pa.array([5, 6, 7]).to_numpy(),
        "name": "n",
        "source": "s",
    }
    # Computed before `has_times` existed.
    assert from_columns(**columns).fingerprint() == "d80ab7b3556143f3"
    assert from_columns(**columns, has_times=False).fingerprint() == "d80ab7b3556143f3"


def windows(folder: Path, valid: list[tuple[int, list[int], int]], test: list[tuple[int, list[int], int]]) -> Path:
    for name, rows in (("valid", valid), ("test", test)):
        columns = dict(zip(("user_id", "history", "target"), map(list, zip(*rows, strict=True)), strict=True))
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    pq.write_table(pa.table({"item_id": [1, 2, 3, 4], "title": ["a", "b", "c", "d"]}), folder / "items.parquet")
    return folder


def test_a_splits_windows_are_put_together(tmp_path: Path) -> None:
    data = read_sequences(windows(tmp_path, [(7, [1, 2], 3), (7, [2, 3], 1), (8, [4], 4)], [(7, [3, 1], 4)]), name="w")
    sequences = {
        data.user_ids[user]: [data.item_ids[item] for item in data.items[data.users == user]]
        for user in range(data.num_users)
    }
    assert sequences == {"7": ["1", "2", "3", "1", "4"], "8": ["4", "4"]}
    assert data.titles[data.item_ids.index("3")] == "c"


def test_windows_that_do_not_meet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"test\.parquet row 1: user 7 has history \[2, 2\]; expected earlier events"):
        read_sequences(windows(tmp_path, [(7, [1, 2], 3)], [(7, [2, 2], 4)]))
