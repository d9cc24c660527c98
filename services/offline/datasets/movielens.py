"""MovieLens, as GroupLens publishes it and as Parquet tables: ratings in the order in which people gave them.

Reads ratings.parquet (+ movies.parquet), ratings.dat (1M, 10M), u.data (100K) and ratings.csv (latest-small, 20M, 25M,
32M), from a folder or straight from the publisher's zip. Films nobody rated are left out. It does not know where the
data lies; see locate.py.
"""

import csv
import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from .interactions import Interactions, from_columns

MOVIELENS_NAMES = ("ml-1m", "ml-latest-small", "ml-100k", "ml-10m", "ml-20m", "ml-25m", "ml-32m")
_RATING_FILES = ("ratings.parquet", "ratings.dat", "u.data", "ratings.csv")
# What the rebuilt ml-1m copy (the one with a ts_err column) may claim about its times.
_REBUILT_NOTE = (
    "order inside each user follows the `order` column; {inexact:,} of the times are known only to a window "
    "(neighbours there may be swapped), the last events of every user are exact"
)
NumberArray = npt.NDArray[np.integer | np.floating]
Titles = dict[str, str]
Categories = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one data set, in a folder or in a zip."""

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
    """Whether `path` is a folder or zip that holds a MovieLens rating file."""
    return path.exists() and any(name in _RATING_FILES for name in _Files(path).names())


def read_movielens(path: Path, *, name: str, found: str = "") -> Interactions:
    """Read one MovieLens set from a folder or zip.

    `found` completes the source sentence ("in ../shared/data/ml-1m", say); the default names the path.
    Raises: ValueError naming the path when no rating file is there or one cannot be parsed.
    """
    files = _Files(path)
    names = files.names()
    where = found or f"from {path}"
    for rating_file in _RATING_FILES:
        if rating_file in names:
            try:
                return _READERS[rating_file](files, name, where)
            except (pa.ArrowException, zipfile.BadZipFile, UnicodeDecodeError, KeyError) as exc:
                raise ValueError(f"{rating_file} of {path} cannot be read as {name}: {exc}") from exc
    raise ValueError(f"{path} holds no MovieLens ratings; expected one of {', '.join(_RATING_FILES)}")


def _read_parquet(files: _Files, name: str, where: str) -> Interactions:
    table = pq.read_table(pa.BufferReader(files.read("ratings.parquet")))
    note = ""
    if "order" in table.column_names:
        order = np.lexsort((table["order"].to_numpy(), table["user_id"].to_numpy()))
        table = table.take(pa.array(order))
    if "ts_err" in table.column_names:
        note = _REBUILT_NOTE.format(inexact=int(np.count_nonzero(table["ts_err"].to_numpy())))
    titles: Titles = {}
    categories: Categories = {}
    if "movies.parquet" in files.names():
        movies = pq.read_table(pa.BufferReader(files.read("movies.parquet")))
        for item, title, genres in zip(
            movies["item_id"].to_pylist(), movies["title"].to_pylist(), movies["genres"].to_pylist(), strict=True
        ):
            titles[str(item)] = title or ""
            categories[str(item)] = _genres(genres or "")
    columns = [table[column].to_numpy() for column in ("user_id", "item_id", "rating", "timestamp")]
    return _assemble(columns, titles, categories, name, where, note)


def _read_dat(files: _Files, name: str, where: str) -> Interactions:
    # Arrow splits at one character; "::" yields an empty column between every two.
    columns = _read_numbers(
        files.read("ratings.dat"), delimiter=":", names=("user", "", "item", "", "rating", "", "time")
    )
    titles: Titles = {}
    categories: Categories = {}
    if "movies.dat" in files.names():
        for line in _text(files.read("movies.dat")).splitlines():
            if line:
                item, title, genres = line.split("::")
                titles[item], categories[item] = title, _genres(genres)
    return _assemble(columns, titles, categories, name, where)


def _read_u_data(files: _Files, name: str, where: str) -> Interactions:
    columns = _read_numbers(files.read("u.data"), delimiter="\t", names=("user", "item", "rating", "time"))
    titles: Titles = {}
    categories: Categories = {}
    if {"u.item", "u.genre"} <= files.names():
        genre_names = [line.split("|")[0] for line in _text(files.read("u.genre")).splitlines() if line]
        for line in _text(files.read("u.item")).splitlines():
            if line:
                item, title, *_, flags = line.split("|", maxsplit=5)
                flagged = zip(genre_names, flags.split("|"), strict=True)
                titles[item] = title
                categories[item] = tuple(genre for genre, flag in flagged if flag == "1" and genre != "unknown")
    return _assemble(columns, titles, categories, name, where)


def _read_csv(files: _Files, name: str, where: str) -> Interactions:
    columns = _read_numbers(files.read("ratings.csv"), delimiter=",", names=("user", "item", "rating", "time"), skip=1)
    titles: Titles = {}
    categories: Categories = {}
    if "movies.csv" in files.names():
        for row in csv.DictReader(io.StringIO(_text(files.read("movies.csv")))):
            titles[row["movieId"]], categories[row["movieId"]] = row["title"], _genres(row["genres"])
    return _assemble(columns, titles, categories, name, where)


_READERS: dict[str, Callable[[_Files, str, str], Interactions]] = {
    "ratings.parquet": _read_parquet,
    "ratings.dat": _read_dat,
    "u.data": _read_u_data,
    "ratings.csv": _read_csv,
}


def _read_numbers(data: bytes, *, delimiter: str, names: tuple[str, ...], skip: int = 0) -> list[NumberArray]:
    wanted = ("user", "item", "rating", "time")
    table = pa_csv.read_csv(
        pa.BufferReader(data),
        read_options=pa_csv.ReadOptions(
            column_names=[column or f"gap{position}" for position, column in enumerate(names)], skip_rows=skip
        ),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter),
        convert_options=pa_csv.ConvertOptions(
            include_columns=list(wanted),
            column_types={"user": pa.int64(), "item": pa.int64(), "rating": pa.float32(), "time": pa.int64()},
        ),
    )
    return [table[column].to_numpy() for column in wanted]


def _assemble(
    columns: list[NumberArray],
    titles: Titles,
    categories: Categories,
    name: str,
    where: str,
    note: str = "",
) -> Interactions:
    users, items, ratings, times = columns
    user_numbers, user_codes = np.unique(users, return_inverse=True)
    item_numbers, item_codes = np.unique(items, return_inverse=True)
    counts = f"{len(users):,} ratings of {len(item_numbers):,} films by {len(user_numbers):,} people"
    return from_columns(
        users=(user_codes, [str(number) for number in user_numbers]),
        items=(item_codes, [str(number) for number in item_numbers]),
        timestamps=times.astype(np.int64),
        values=ratings.astype(np.float32),
        types=(np.zeros(len(users), dtype=np.int16), ["rating"]),
        titles=titles,
        categories=categories,
        name=name,
        source=f"MovieLens {name} {where}: {counts}" + (f"; {note}" if note else ""),
    )


def _genres(text: str) -> tuple[str, ...]:
    return tuple(genre for genre in re.split(r"\|", text.strip()) if genre and genre != "(no genres listed)")


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
