"""MovieLens, from GroupLens' files or Parquet tables.

Reads ratings.parquet (+ movies.parquet), ratings.dat (1M, 10M), u.data (100K) and ratings.csv (latest-small, 20M, 25M,
32M), from a folder or the publisher's zip. Films without ratings are omitted.
"""

import csv
import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from .interactions import Interactions, from_columns

MOVIELENS_NAMES = ("ml-1m", "ml-latest-small", "ml-100k", "ml-10m", "ml-20m", "ml-25m", "ml-32m")
# Describes the times of the rebuilt ml-1m copy, which has a ts_err column.
_REBUILT_NOTE = (
    "order inside each user follows the `order` column; {inexact:,} of the times are known only to a window "
    "(neighbours there may be swapped), the last events of every user are exact"
)
NumberArray = npt.NDArray[np.integer | np.floating]
# Users, items, ratings and times, and a note about the times.
_Ratings = tuple[list[NumberArray], str]
# Number, title and genres.
_Films = Iterator[tuple[str, str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class _Files:
    path: Path

    def names(self) -> set[str]:
        if self.path.is_dir():
            return {entry.name for entry in self.path.iterdir()}
        if zipfile.is_zipfile(self.path):
            with zipfile.ZipFile(self.path) as archive:
                return {Path(name).name for name in archive.namelist()}
        return set()

    def read(self, name: str) -> bytes:
        if self.path.is_dir():
            return (self.path / name).read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            member = min((entry for entry in archive.namelist() if Path(entry).name == name), key=len)
            return archive.read(member)


def is_movielens(path: Path) -> bool:
    """Whether `path` is a folder or zip with a MovieLens rating file."""
    return path.exists() and not _Files(path).names().isdisjoint(_FORMATS)


def read_movielens(path: Path, *, name: str, found: str = "") -> Interactions:
    """Read one MovieLens set from a folder or zip.

    found: where the set was found, for `Interactions.source`, such as "in ../shared/data/ml-1m".
    Raises: ValueError naming the path if the rating file is missing or cannot be parsed.
    """
    files = _Files(path)
    names = files.names()
    rating_file = next((name for name in _FORMATS if name in names), None)
    if rating_file is None:
        raise ValueError(f"{path} holds no MovieLens ratings; expected one of {', '.join(_FORMATS)}")
    form = _FORMATS[rating_file]
    try:
        (users, items, ratings, times), note = form.ratings(files)
        films = list(form.films(files)) if form.film_files <= names else []
    except (pa.ArrowException, zipfile.BadZipFile, UnicodeDecodeError, KeyError) as exc:
        raise ValueError(f"{rating_file} of {path} cannot be read as {name}: {exc}") from exc
    for column, cells in (("user", users), ("item", items), ("rating", ratings), ("time", times)):
        missing = pa.array(cells, from_pandas=True).is_null().to_numpy(zero_copy_only=False)
        if missing.any():
            share = f"{np.count_nonzero(missing):,} of {len(missing):,}, first: rating {np.argmax(missing) + 1}"
            raise ValueError(f"{rating_file} of {path}: {column} is missing ({share})")
    user_numbers, user_codes = np.unique(users, return_inverse=True)
    item_numbers, item_codes = np.unique(items, return_inverse=True)
    counts = f"{len(users):,} ratings of {len(item_numbers):,} films by {len(user_numbers):,} people"
    return from_columns(
        users=(user_codes, [str(number) for number in user_numbers]),
        items=(item_codes, [str(number) for number in item_numbers]),
        timestamps=times.astype(np.int64),
        values=ratings.astype(np.float32),
        types=(np.zeros(len(users), dtype=np.int16), ["rating"]),
        titles={film: title for film, title, _ in films},
        categories={film: genres for film, _, genres in films},
        name=name,
        source=f"MovieLens {name} {found or f'from {path}'}: {counts}" + (f"; {note}" if note else ""),
    )


def _parquet_ratings(files: _Files) -> _Ratings:
    table = pq.read_table(pa.BufferReader(files.read("ratings.parquet")))
    note = ""
    if "order" in table.column_names:
        order = np.lexsort((table["order"].to_numpy(), table["user_id"].to_numpy()))
        table = table.take(pa.array(order))
    if "ts_err" in table.column_names:
        note = _REBUILT_NOTE.format(inexact=int(np.count_nonzero(table["ts_err"].to_numpy())))
    return [table[column].to_numpy() for column in ("user_id", "item_id", "rating", "timestamp")], note


def _parquet_films(files: _Files) -> _Films:
    for film in pq.read_table(pa.BufferReader(files.read("movies.parquet"))).to_pylist():
        yield str(film["item_id"]), film["title"] or "", _genres(film["genres"] or "")


def _text_ratings(name: str, delimiter: str, *, skip: int = 0) -> Callable[[_Files], _Ratings]:
    """Return a reader of numeric columns. Arrow splits at one character, so "::" adds an empty column."""
    wanted = ("user", "item", "rating", "time")
    names = [f"{gap}{column}" for column in wanted for gap in ("", "gap_")][:-1] if delimiter == "::" else list(wanted)

    def read(files: _Files) -> _Ratings:
        table = pa_csv.read_csv(
            pa.BufferReader(files.read(name)),
            read_options=pa_csv.ReadOptions(column_names=names, skip_rows=skip),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter[0]),
            convert_options=pa_csv.ConvertOptions(
                include_columns=list(wanted),
                column_types={"user": pa.int64(), "item": pa.int64(), "rating": pa.float32(), "time": pa.int64()},
            ),
        )
        return [table[column].to_numpy() for column in wanted], ""

    return read


def _dat_films(files: _Files) -> _Films:
    for line in _lines(files, "movies.dat"):
        film, title, genres = line.split("::")
        yield film, title, _genres(genres)


def _u_films(files: _Files) -> _Films:
    genre_names = [line.split("|")[0] for line in _lines(files, "u.genre")]
    for line in _lines(files, "u.item"):
        film, title, *_, flags = line.split("|", maxsplit=5)
        flagged = zip(genre_names, flags.split("|"), strict=True)
        yield film, title, tuple(genre for genre, flag in flagged if flag == "1" and genre != "unknown")


def _csv_films(files: _Files) -> _Films:
    for row in csv.DictReader(io.StringIO(_text(files.read("movies.csv")))):
        yield row["movieId"], row["title"], _genres(row["genres"])


@dataclass(frozen=True, slots=True)
class _Format:
    ratings: Callable[[_Files], _Ratings]
    film_files: frozenset[str]
    films: Callable[[_Files], _Films]


# By rating file, in search order.
_FORMATS = {
    "ratings.parquet": _Format(_parquet_ratings, frozenset({"movies.parquet"}), _parquet_films),
    "ratings.dat": _Format(_text_ratings("ratings.dat", "::"), frozenset({"movies.dat"}), _dat_films),
    "u.data": _Format(_text_ratings("u.data", "\t"), frozenset({"u.item", "u.genre"}), _u_films),
    "ratings.csv": _Format(_text_ratings("ratings.csv", ",", skip=1), frozenset({"movies.csv"}), _csv_films),
}


def _lines(files: _Files, name: str) -> list[str]:
    return [line for line in _text(files.read(name)).splitlines() if line]


def _genres(text: str) -> tuple[str, ...]:
    return tuple(genre for genre in text.strip().split("|") if genre and genre != "(no genres listed)")


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
