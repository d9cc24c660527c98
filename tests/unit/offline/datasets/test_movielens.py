"""MovieLens in every published form gives the same events, titles and order."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.offline.datasets import DatasetUnavailableError, Interactions, load_dataset
from services.offline.datasets.movielens import is_movielens, read_movielens

WriteSet = Callable[[Path], Path]


def events(data: Interactions) -> list[tuple[str, str, float, int]]:
    return [
        (data.user_ids[user], data.item_ids[item], float(value), int(time))
        for user, item, value, time in zip(data.users, data.items, data.values, data.timestamps, strict=True)
    ]


EXPECTED = [
    ("10", "1", 4.0, 978_300_050),
    ("9", "2", 1.0, 978_300_075),
    ("10", "2", 5.0, 978_300_100),
    ("10", "30", 3.0, 978_300_100),
]


def test_the_publishers_files_give_events_in_time_order_titles_and_genres(
    tmp_path: Path, write_ml_1m: WriteSet
) -> None:
    data = read_movielens(write_ml_1m(tmp_path / "ml-1m"), name="ml-1m")
    assert events(data) == EXPECTED
    assert data.type_names == ["rating"]
    # By number, without the film that nobody rated; titles are Latin-1.
    assert data.user_ids == ["9", "10"]
    assert data.item_ids == ["1", "2", "30"]
    assert data.titles == ["Toy Story (1995)", "Misérables, Les (1995)", "X (1990)"]
    assert data.categories[0] == ("Animation", "Comedy")


def test_the_publishers_zip_reads_like_the_folder(tmp_path: Path, write_ml_1m: WriteSet) -> None:
    folder = write_ml_1m(tmp_path / "ml-1m")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        for entry in folder.iterdir():
            archive.write(entry, f"ml-1m/{entry.name}")
    from_zip = read_movielens(tmp_path / "ml-1m.zip", name="ml-1m")
    assert from_zip.fingerprint() == read_movielens(folder, name="ml-1m").fingerprint()
    assert from_zip.titles[1] == "Misérables, Les (1995)"


def test_u_data_with_genre_flags_is_read(tmp_path: Path, rating_rows: list[tuple[int, int, int, int]]) -> None:
    (tmp_path / "u.data").write_text("".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rating_rows))
    (tmp_path / "u.genre").write_text("unknown|0\nAction|1\nComedy|2\n\n")
    (tmp_path / "u.item").write_bytes(
        "1|Toy Story (1995)|01-Jan-1995||http://x|0|0|1\n2|É (1995)|||http://y|0|1|1\n30|Z|||u|1|0|0\n".encode(
            "latin-1"
        )
    )
    data = read_movielens(tmp_path, name="ml-100k")
    assert events(data) == EXPECTED
    assert data.categories == [("Comedy",), ("Action", "Comedy"), ()]
    assert data.titles[1] == "É (1995)"


def test_ratings_csv_with_quoted_titles_is_read(tmp_path: Path, rating_rows: list[tuple[int, int, int, int]]) -> None:
    (tmp_path / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n" + "".join(f"{u},{i},{r}.0,{t}\n" for u, i, r, t in rating_rows)
    )
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n1,"American President, The (1995)",Comedy|Drama\n2,B,(no genres listed)\n',
        encoding="utf-8",
    )
    data = read_movielens(tmp_path, name="ml-latest-small")
    assert events(data) == EXPECTED
    assert data.titles == ["American President, The (1995)", "B", ""]
    assert data.categories == [("Comedy", "Drama"), (), ()]


def test_parquet_follows_the_order_column_where_times_are_rough(tmp_path: Path) -> None:
    table = pa.table(
        {
            "user_id": [1, 1, 1],
            "item_id": [5, 6, 7],
            "rating": [1, 2, 3],
            "timestamp": [978_300_000, 978_300_000, 978_300_000],
            "ts_err": [500, 0, 0],
            "order": [2, 0, 1],
        }
    )
    pq.write_table(table, tmp_path / "ratings.parquet")
    data = read_movielens(tmp_path, name="ml-1m")
    assert [data.item_ids[item] for item in data.items] == ["6", "7", "5"]
    assert "`order` column" in data.source
    assert "1 of the times" in data.source


@pytest.mark.parametrize(
    ("row", "column"),
    [(",2,3.0,978300002", "user"), ("1,,3.0,978300002", "item"), ("1,2,,978300002", "rating"), ("1,2,3.0,", "time")],
)
def test_a_missing_cell_is_named_and_does_not_become_a_number(tmp_path: Path, row: str, column: str) -> None:
    (tmp_path / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n1,1,4.0,978300001\n{row}\n")
    with pytest.raises(ValueError, match=rf"{column} is missing \(1 of 2, first: rating 2\)"):
        read_movielens(tmp_path, name="mine")


def test_a_broken_rating_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::2::five::978300000\n")
    with pytest.raises(ValueError, match=r"ratings\.dat of .* cannot be read as ml-1m"):
        read_movielens(tmp_path, name="ml-1m")


def test_a_folder_without_ratings_is_refused(tmp_path: Path) -> None:
    assert not is_movielens(tmp_path)
    with pytest.raises(ValueError, match="holds no MovieLens ratings"):
        read_movielens(tmp_path, name="ml-1m")


def test_the_real_ml_1m_has_its_published_counts() -> None:
    try:
        data = load_dataset("ml-1m", download=False)
    except DatasetUnavailableError as exc:
        pytest.skip(f"no MovieLens-1M on this machine: {exc}")
    assert (len(data), data.num_users, data.num_items) == (1_000_209, 6_040, 3_706)
    assert data.titles[data.item_ids.index("1193")] == "One Flew Over the Cuckoo's Nest (1975)"
    usual = data.keep_frequent(min_per_item=5)
    assert (len(usual), usual.num_items) == (999_611, 3_416)
    assert np.all(np.diff(data.timestamps) >= 0)
