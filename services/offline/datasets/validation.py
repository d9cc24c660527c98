"""The usual troubles of interaction data, found before they cost a training run: what, where, how many, what to do.

Works on a file that read_table would refuse (it reports every kind of bad row instead of stopping at the first) and on
Interactions already loaded. An "error" keeps the data from being loaded or trained on; a "warning" makes results
misleading; "info" is worth knowing. It changes nothing and reads no clock unless `now_s` is left out.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .interactions import Interactions
from .movielens import is_movielens, read_movielens
from .sequences import is_sequences, read_sequences
from .table import MAX_ID_BYTES, ColumnNames, RawTable, id_problem, id_texts, read_raw_table, values_of
from .timestamps import parse_timestamps

Severity = Literal["error", "warning", "info"]
MaskArray = npt.NDArray[np.bool_]
_SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}
_ROWS_SHOWN = 5
MIN_EVENTS_PER_USER = 3
MIN_EVENTS_PER_ITEM = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One trouble. `where` names rows (file rows, or events in time order) or the column; `count` is how many."""

    severity: Severity
    what: str
    where: str
    count: int
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """What the checks look at. Codes are -1 where an id is missing; times, values may be absent (None)."""

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    user_ids: Sequence[str]
    item_ids: Sequence[str]
    types: npt.NDArray[np.int64]
    times_s: npt.NDArray[np.int64] | None
    values: npt.NDArray[np.float64] | None
    titles: npt.NDArray[np.int64] | None
    num_types: int
    first_row: int
    row_word: str
    has_times: bool = True

    def rows(self, mask: MaskArray, severity: Severity, what: str, advice: str) -> Iterator[Finding]:
        """A finding of the rows that the mask chooses; none where it chooses none."""
        count = int(np.count_nonzero(mask))
        if count:
            where = _shown(self.row_word, mask, lambda row: str(row + self.first_row))
            yield _finding(severity, what, where, count, advice)


def validate(
    data: Interactions | str | Path,
    *,
    columns: ColumnNames | None = None,
    header: Sequence[str] | None = None,
    timestamp_unit: str = "auto",
    now_s: float | None = None,
) -> list[Finding]:
    """Check a table, sequences, a MovieLens folder or zip, or loaded Interactions.

    Worst findings first, [] when all is well.
    `columns`, `header` and `timestamp_unit` as in read_table; `now_s` (unix seconds, default: now) is what the future
    is measured from.
    """
    findings: list[Finding] = []
    if isinstance(data, Interactions):
        checked = _from_interactions(data)
    else:
        path = Path(data)
        try:
            if is_movielens(path):
                checked = _from_interactions(read_movielens(path, name=path.stem))
            elif is_sequences(path):
                checked = _from_interactions(read_sequences(path))
            else:
                checked = _from_raw(read_raw_table(path, columns, header=header), timestamp_unit, findings)
        except ValueError as exc:
            return [_finding("error", "the file can't be read", str(path), 1, str(exc))]
    if not len(checked.users):
        return [_finding("error", "no events", "the whole table", 0, "give a table with at least one row")]
    now = time.time() if now_s is None else now_s
    findings.extend(finding for check in _CHECKS for finding in check(checked, now))
    return sorted(findings, key=lambda finding: (_SEVERITY_ORDER[finding.severity], -finding.count))


def _from_interactions(data: Interactions) -> _Columns:
    return _Columns(
        users=data.users.astype(np.int64),
        items=data.items.astype(np.int64),
        user_ids=data.user_ids,
        item_ids=data.item_ids,
        types=data.types.astype(np.int64),
        times_s=data.timestamps,
        values=data.values.astype(np.float64),
        titles=None,
        num_types=len(np.unique(data.types)),
        first_row=1,
        row_word="events (in time order)" if data.has_times else "events (by position in their user's sequence)",
        has_times=data.has_times,
    )


def _from_raw(raw: RawTable, timestamp_unit: str, findings: list[Finding]) -> _Columns:
    users, user_ids = _lenient_codes(raw.columns["user"])
    items, item_ids = _lenient_codes(raw.columns["item"])
    types, type_names = _lenient_codes(raw.columns["type"]) if "type" in raw.columns else (np.zeros_like(users), [""])
    titles = _lenient_codes(raw.columns["title"])[0] if "title" in raw.columns else None
    times_s, values = None, None
    try:
        times_s = parse_timestamps(raw.columns["timestamp"], unit=timestamp_unit, first_row=raw.first_row).seconds
    except ValueError as exc:
        bad = int(raw.columns["timestamp"].null_count) or 1
        findings.append(_finding("error", "timestamps can't be read", "timestamp column", bad, str(exc)))
    if "value" in raw.columns:
        try:
            values = values_of(raw.columns["value"])
        except ValueError as exc:
            findings.append(_finding("error", "values can't be read", "value column", 1, str(exc)))
    for role, column in raw.columns.items():
        if role not in ("user", "item", "timestamp", "value") and column.null_count == len(column):
            findings.append(_finding("info", f"{role} column is empty", role, len(column), "it may be left out"))
    return _Columns(
        users=users,
        items=items,
        user_ids=user_ids,
        item_ids=item_ids,
        types=types,
        times_s=times_s,
        values=values,
        titles=titles,
        num_types=len(type_names),
        first_row=raw.first_row,
        row_word="rows",
    )


def _lenient_codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], list[str]]:
    encoded = id_texts(column).dictionary_encode().combine_chunks()
    return encoded.indices.fill_null(-1).to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _check_ids(columns: _Columns, now_s: float) -> Iterator[Finding]:
    for role, codes, ids in (
        ("user", columns.users, columns.user_ids),
        ("item", columns.items, columns.item_ids),
    ):
        yield from columns.rows(codes < 0, "error", f"{role} id is missing", "fill the cell or remove the row")
        problems = {code: problem for code, text in enumerate(ids) if (problem := id_problem(text))}
        if problems:
            bad = np.isin(codes, np.fromiter(problems, dtype=np.int64))
            kinds = ", ".join(sorted(set(problems.values()))[:3])
            advice = f"ids are 1 to {MAX_ID_BYTES} bytes of UTF-8 without control characters; map or remove them"
            yield from columns.rows(bad, "error", f"{role} id out of range ({kinds})", advice)
        twins = _twins(ids)
        if len(twins):
            advice = f"{ids[twins[0]]!r} and a twin differ only by blanks or case; decide on one spelling"
            yield from columns.rows(np.isin(codes, twins), "warning", f"{role} ids that look alike", advice)


def _twins(ids: Sequence[str]) -> npt.NDArray[np.int64]:
    if not ids:
        return np.zeros(0, dtype=np.int64)
    plain = np.array([text.strip().casefold() for text in ids], dtype=object).astype(str)
    _, group, sizes = np.unique(plain, return_inverse=True, return_counts=True)
    return np.flatnonzero(sizes[group] > 1).astype(np.int64)


def _check_values(columns: _Columns, now_s: float) -> Iterator[Finding]:
    if columns.values is None:
        return
    finite = np.isfinite(columns.values)
    advice = "give a finite number, or leave the cell empty"
    yield from columns.rows(~finite, "error", "value is NaN or infinite", advice)
    if len(columns.values) > 1 and finite.all() and np.ptp(columns.values) == 0:
        what = f"value column is constant ({columns.values[0]:g})"
        advice = "it carries no signal; leave it out, or check that the right column was chosen"
        yield _finding("info", what, "value column", len(columns.values), advice)


def _check_times(columns: _Columns, now_s: float) -> Iterator[Finding]:
    times = columns.times_s
    if times is None:
        return
    if not columns.has_times:
        advice = "the order inside each user is known, times are not: leave-one-out is possible, a split by time is not"
        yield _finding("info", "order only, no timestamps", "the whole table", len(times), advice)
        return
    advice = "an event is at most one day ahead of the clock; check unit and time zone, or remove the rows"
    yield from columns.rows(times > now_s + 86_400, "error", "timestamp lies in the future", advice)
    if len(times) > 1 and np.ptp(times) == 0:
        advice = "no order can be learned and no time split made; give real times, or a counter as seconds"
        yield _finding("error", "all timestamps are equal", "timestamp column", len(times), advice)
    elif len(times) > 1 and (times % 86_400 == 0).all():
        advice = "the order inside a day is the file's order; give times to the second if you have them"
        yield _finding("warning", "timestamps are whole days", "timestamp column", len(times), advice)
    going_back = np.zeros(len(times), dtype=bool)
    by_user = np.argsort(columns.users, kind="stable")
    same_user = columns.users[by_user][1:] == columns.users[by_user][:-1]
    going_back[by_user[1:]] = same_user & (np.diff(times[by_user]) < 0)
    advice = "nothing to do: the reader sorts by time. Check that rows were not shuffled if their order mattered"
    yield from columns.rows(going_back, "warning", "times go back inside a user's rows", advice)


def _check_duplicates(columns: _Columns, now_s: float) -> Iterator[Finding]:
    if columns.times_s is None:
        return
    repeated = _repeats((columns.users, columns.items, columns.types, columns.times_s))
    advice = "the same user, item, type and second again: remove the copies, or a model learns them as habit"
    yield from columns.rows(repeated, "warning", "duplicate events", advice)
    again = _repeats((columns.users, columns.items, columns.types)) & ~repeated
    advice = "fine if people repeat things; then ask for recommendations with exclude_seen off"
    yield from columns.rows(again, "info", "a user takes the same item again later", advice)


def _check_amounts(columns: _Columns, now_s: float) -> Iterator[Finding]:
    counts = {}
    for role, codes, ids in (("user", columns.users, columns.user_ids), ("item", columns.items, columns.item_ids)):
        known = codes[codes >= 0]
        counts[role] = np.bincount(known, minlength=len(ids))
        if len(known) and len(ids) == 1:
            what = f"{role} column is constant ({ids[0][:40]!r})"
            advice = "recommendations need many; check that the right column was chosen"
            yield _finding("error", what, f"{role} column", len(known), advice)
    total = counts["user"].sum()
    dominates = (counts["user"] > max(0.2 * total, 100)) & (len(columns.user_ids) > 1)
    few = f"fewer than {MIN_EVENTS_PER_USER} events: they train but are never tested; drop them if most are so"
    rare = f"fewer than {MIN_EVENTS_PER_ITEM} events: little can be learned of them; the literature drops them"
    heavy = "more than a fifth of all events: a robot or a shared account? Remove it or split it"
    rows: tuple[tuple[Severity, str, Sequence[str], MaskArray, str], ...] = (
        ("warning", "users with too few events", columns.user_ids, counts["user"] < MIN_EVENTS_PER_USER, few),
        ("info", "rare items", columns.item_ids, counts["item"] < MIN_EVENTS_PER_ITEM, rare),
        ("warning", "one user dominates", columns.user_ids, dominates, heavy),
    )
    for severity, what, ids, mask, advice in rows:
        if mask.any():
            yield _finding(severity, what, _shown("ids", mask, ids.__getitem__), int(mask.sum()), advice)


def _check_titles(columns: _Columns, now_s: float) -> Iterator[Finding]:
    if columns.titles is None:
        return
    rows = np.flatnonzero((columns.titles >= 0) & (columns.items >= 0))
    if len(rows):
        _, first, group = np.unique(columns.items[rows], return_index=True, return_inverse=True)
        other = np.zeros(len(columns.items), dtype=bool)
        other[rows] = columns.titles[rows] != columns.titles[rows[first[group]]]
        advice = "the first title of an item is used; check that ids are not reused"
        yield from columns.rows(other, "warning", "an item has several titles", advice)


_CHECKS: tuple[Callable[[_Columns, float], Iterator[Finding]], ...] = (
    _check_ids,
    _check_values,
    _check_times,
    _check_duplicates,
    _check_amounts,
    _check_titles,
)


def _repeats(keys: tuple[npt.NDArray[np.int64], ...]) -> MaskArray:
    """Rows whose key occurred in an earlier row."""
    order = np.lexsort(keys[::-1])
    equal = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        equal &= key[order][1:] == key[order][:-1]
    repeated = np.zeros(len(order), dtype=bool)
    repeated[order[1:]] = equal
    return repeated


def _shown(word: str, mask: MaskArray, name: Callable[[int], str]) -> str:
    """The first few of what the mask chooses, by name, and how many more."""
    rows = np.flatnonzero(mask)
    more = f" and {len(rows) - _ROWS_SHOWN:,} more" if len(rows) > _ROWS_SHOWN else ""
    return f"{word} {', '.join(name(row) for row in rows[:_ROWS_SHOWN].tolist())}{more}"


def _finding(severity: Severity, what: str, where: str, count: int, advice: str) -> Finding:
    return Finding(severity=severity, what=what, where=where, count=count, advice=advice)
