"""Sequences without timestamps: one row per user with item ids, oldest first.

It reads `sequences.parquet` (columns user_id and items) from a folder, or any such Parquet file. It joins the windows
of a split (columns user_id, history, target of valid.parquet and test.parquet) by user. The timestamp is the position
in the sequence, and `has_times` is False.

Letters: N events, U users.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .interactions import Interactions, from_columns
from .table import Coded, coded, id_texts
from .validation import MAX_ID_BYTES, id_problem

SEQUENCE_NAMES = (
    "amazon-beauty-2014",
    "amazon-sports-2014",
    "amazon-beauty-large-2014",
    "amazon-videogames-2014",
    "amazon-games-2018",
    "amazon-office-2018",
    "amazon-industrial-2018",
    "lastfm-2k",
    "wikipedia-edits",
)
SEQUENCE_FILE = "sequences.parquet"
_WINDOW_FILES = ("valid.parquet", "test.parquet")  # oldest first
_USER, _ITEMS = "user_id", "items"
_HISTORY, _TARGET = "history", "target"
_PARQUET_SUFFIXES = (".parquet", ".pq")


def is_sequences(path: Path) -> bool:
    """Whether `path` has a sequences.parquet or a split's windows, or is Parquet with a column of lists."""
    if path.is_dir():
        return (path / SEQUENCE_FILE).is_file() or _has_windows(path)
    if not path.is_file() or path.suffix.lower() not in _PARQUET_SUFFIXES:
        return False
    if path.name == SEQUENCE_FILE:
        return True
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return False
    return _ITEMS in schema.names and _is_list(schema.field(_ITEMS).type)


def read_sequences(path: str | Path, *, name: str = "", found: str = "") -> Interactions:
    """Read a table of sequences, from its folder or the file itself.

    Titles come from items.parquet, categories from attributes.parquet of the same folder. `found` completes the source
    sentence ("in ../shared/data").
    Raises: ValueError naming file, column, row (from 1) and value.
    """
    path = Path(path)
    file = path / SEQUENCE_FILE if path.is_dir() else path
    table = _from_windows(path) if _has_windows(path) else _read(file, (_USER, _ITEMS))
    if not _is_list(table[_ITEMS].type):
        raise ValueError(
            f"{file}: column items has type {table[_ITEMS].type}; expected a list of item ids per user, oldest first"
        )
    user_codes, user_ids = _coded_ids(table[_USER], f"{file}: column {_USER}", lambda row: row + 1)
    if len(user_ids) < len(user_codes):
        again = int(np.flatnonzero(np.bincount(user_codes) > 1)[0])
        first, second = (np.flatnonzero(user_codes == again)[:2] + 1).tolist()
        raise ValueError(
            f"{file}: user_id {user_ids[again]!r} is in rows {first} and {second}; give one row per user, because "
            "the order of events in different rows is unknown"
        )
    lists = table[_ITEMS].combine_chunks()
    if lists.null_count:
        row = int(np.argmax(lists.is_null().to_numpy(zero_copy_only=False))) + 1
        raise ValueError(f"{file}: column {_ITEMS} in row {row} is missing; give a list, which may be empty")
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    users = np.repeat(np.arange(len(user_ids)), lengths)
    if not len(users):
        raise ValueError(f"{file}: column items holds no item; give at least one user with one item")
    flat = pa.chunked_array([lists.flatten()])
    items, item_ids = _coded_ids(flat, f"{file}: an id of column {_ITEMS}", lambda event: int(users[event]) + 1)
    positions = np.arange(len(users)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    titles, categories = _item_texts(file.parent) if file.name == SEQUENCE_FILE else ({}, {})
    if not name:
        name = file.resolve().parent.name if file.name == SEQUENCE_FILE else file.stem
    counts = f"{len(users):,} events of {np.count_nonzero(lengths):,} users with {len(item_ids):,} items"
    return from_columns(
        users=(users, user_ids),
        items=(items, item_ids),
        timestamps=positions,
        titles=titles,
        categories=categories,
        name=name,
        source=f"{name} {found or f'from {path}'}: {counts}; order only, no timestamps",
        has_times=False,
    )


def _coded_ids(column: pa.ChunkedArray, what: str, row_of: Callable[[int], int]) -> Coded:
    """Return codes (N,) and vocabulary of valid ids; `what` names the column, `row_of` gives a value's row."""
    codes, ids = coded(id_texts(column))
    if (codes < 0).any():
        raise ValueError(f"{what} in row {row_of(int(np.argmax(codes < 0)))} is missing; fill or remove it")
    for code, problem in enumerate(map(id_problem, ids)):
        if problem:
            row = row_of(int(np.argmax(codes == code)))
            raise ValueError(f"{what}={ids[code][:40]!r} in row {row} {problem}; allowed: 1 to {MAX_ID_BYTES} bytes")
    return codes, ids


def _has_windows(folder: Path) -> bool:
    return not (folder / SEQUENCE_FILE).is_file() and all((folder / name).is_file() for name in _WINDOW_FILES)


def _from_windows(folder: Path) -> pa.Table:
    """Join each user's first history with all targets.

    Raises: ValueError naming file and row if a window's history is not the end of the user's events joined so far.
    """
    found: dict[object, list[object]] = {}
    for name in _WINDOW_FILES:
        windows = _read(folder / name, (_USER, _HISTORY, _TARGET))
        columns = (windows[column].to_pylist() for column in (_USER, _HISTORY, _TARGET))
        for row, (user, history, target) in enumerate(zip(*columns, strict=True), start=1):
            before = found.setdefault(user, list(history))
            if before[-len(history) :] != history:
                raise ValueError(
                    f"{folder / name} row {row}: user {user!r} has history {history}; expected earlier events"
                )
            before.append(target)
    return pa.table({_USER: list(found), _ITEMS: list(found.values())})


def _read(file: Path, columns: Sequence[str]) -> pa.Table:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{file} cannot be read as Parquet: {exc}") from exc
    for column in columns:
        if column not in table.column_names:
            raise ValueError(f"{file} has no column {column}; it has: {', '.join(table.column_names)}")
    return table


def _item_texts(folder: Path) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    if not (folder / "items.parquet").is_file():
        return {}, {}
    items = _read(folder / "items.parquet", ("item_id",))
    item_ids = id_texts(items["item_id"]).to_pylist()
    titles: dict[str, str] = {}
    categories: dict[str, tuple[str, ...]] = {}
    if "title" in items.column_names:
        titles = {item: title or "" for item, title in zip(item_ids, items["title"].to_pylist(), strict=True)}
    if "attribute_ids" in items.column_names and (folder / "attributes.parquet").is_file():
        attributes = _read(folder / "attributes.parquet", ("attribute_id", "name"))
        names = dict(zip(attributes["attribute_id"].to_pylist(), attributes["name"].to_pylist(), strict=True))
        for item, numbers in zip(item_ids, items["attribute_ids"].to_pylist(), strict=True):
            known = (names.get(number) for number in numbers or ())
            categories[item] = tuple(dict.fromkeys(text for text in known if text))
    return titles, categories


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
