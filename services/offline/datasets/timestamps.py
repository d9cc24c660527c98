"""Event times in whatever unit a file has them, turned into unix seconds without guessing wrongly.

A number is taken as seconds, milliseconds, microseconds or nanoseconds only if every row fits that one unit between
1973 and 2100; text only if it is ISO 8601 (no zone means UTC). Anything else is an error that names rows and the way
out. It does not sort and does not know what the events are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

TIMESTAMP_UNITS = ("auto", "s", "ms", "us", "ns", "iso")
# 1973-03-03 and 2100-01-01: below the first, a "time" is as likely a counter.
_EARLIEST_S = 100_000_000
_LATEST_S = 4_102_444_800
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


class AmbiguousTimestampError(ValueError):
    """The unit of the timestamps can't be told; the message names rows and the setting that decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTimes:
    """seconds (N,) unix seconds, rounded down; `unit` says how they were read."""

    seconds: npt.NDArray[np.int64]
    unit: str


def parse_timestamps(column: pa.ChunkedArray, *, unit: str = "auto", first_row: int = 1) -> ParsedTimes:
    """Read a column of times.

    `unit`: one of TIMESTAMP_UNITS. `first_row` is the number of the first row in messages (2 for a CSV with a header).
    Raises: AmbiguousTimestampError when "auto" can't tell; ValueError for missing, negative or unreadable times.
    """
    if unit not in TIMESTAMP_UNITS:
        raise ValueError(f"timestamp_unit={unit!r}; allowed: {', '.join(TIMESTAMP_UNITS)}")
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0]) + first_row
        raise ValueError(f"timestamp is missing in {column.null_count} rows (first: row {row}); fill or remove them")
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return ParsedTimes(seconds=_arrow_seconds(column), unit="iso")
    if _is_text(column.type):
        numbers = None if unit == "iso" else _as_numbers(column)
        if numbers is None:
            return ParsedTimes(seconds=_iso_seconds(column, first_row), unit="iso")
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        numbers = column.cast(pa.float64()).to_numpy() if pa.types.is_decimal(column.type) else column.to_numpy()
    else:
        raise ValueError(f"timestamp has type {column.type}; expected numbers, ISO 8601 text or a timestamp type")
    if unit == "iso":
        raise ValueError(f"timestamp has type {column.type}; timestamp_unit='iso' expects ISO 8601 text")
    return _from_numbers(numbers, unit, first_row)


def _from_numbers(numbers: npt.NDArray[np.integer | np.floating], unit: str, first_row: int) -> ParsedTimes:
    if len(numbers) == 0:
        return ParsedTimes(seconds=np.zeros(0, dtype=np.int64), unit=unit)
    bad = np.flatnonzero(~np.isfinite(numbers) | (numbers < 0))
    if len(bad):
        raise ValueError(
            f"timestamp is negative, NaN or infinite in {len(bad)} rows (first: row {int(bad[0]) + first_row}, "
            f"value {numbers[bad[0]]}); allowed: 0 and later"
        )
    if unit == "auto":
        unit = _detect_unit(numbers, first_row)
    if np.issubdtype(numbers.dtype, np.integer):
        seconds = numbers.astype(np.int64) // _PER_SECOND[unit]
    else:
        seconds = np.floor(numbers / _PER_SECOND[unit]).astype(np.int64)
    if int(seconds.max()) > _LATEST_S:
        row = int(seconds.argmax())
        raise ValueError(
            f"timestamp {numbers[row]} of row {row + first_row} read as {unit} lies after the year 2100; "
            "set timestamp_unit to the file's unit"
        )
    return ParsedTimes(seconds=seconds, unit=unit)


def _detect_unit(numbers: npt.NDArray[np.integer | np.floating], first_row: int) -> str:
    low_row, high_row = int(numbers.argmin()), int(numbers.argmax())
    low, high = numbers[low_row], numbers[high_row]
    for unit, per_second in _PER_SECOND.items():
        if low >= _EARLIEST_S * per_second and high <= _LATEST_S * per_second:
            return unit
    raise AmbiguousTimestampError(
        f"timestamp: no one unit (s, ms, us, ns) puts every row between 1973 and 2100; smallest {low} (row "
        f"{low_row + first_row}), largest {high} (row {high_row + first_row}). Set timestamp_unit to one of s, ms, us, "
        "ns if the file is right, or repair those rows"
    )


def _iso_seconds(column: pa.ChunkedArray, first_row: int) -> npt.NDArray[np.int64]:
    # Arrow reads zoned text only as a zoned type and plain text only as a plain one; a file may hold both.
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    zoned = pc.match_substring_regex(text, r"(?:[zZ]|[+-]\d{2}:?(?:\d{2})?)$").to_numpy(zero_copy_only=False)
    has_clock = pc.match_substring(text, ":").to_numpy(zero_copy_only=False)
    zoned = zoned & has_clock
    seconds = np.zeros(len(column), dtype=np.int64)
    for rows, kind in (
        (np.flatnonzero(zoned), pa.timestamp("us", "UTC")),
        (np.flatnonzero(~zoned), pa.timestamp("us")),
    ):
        if len(rows):
            part = text.take(pa.array(rows))
            try:
                seconds[rows] = _arrow_seconds(part.cast(kind))
            except pa.ArrowInvalid as exc:
                row, value = _first_unreadable(part, kind, rows)
                raise AmbiguousTimestampError(
                    f"timestamp {value!r} in row {row + first_row} is not ISO 8601 "
                    "(2021-03-05T12:00:00Z); day and month orders are not guessed, numbers and dates may not be mixed"
                ) from exc
    return seconds


def _first_unreadable(part: pa.ChunkedArray, kind: pa.DataType, rows: npt.NDArray[np.int64]) -> tuple[int, str]:
    # Halving finds the first bad row of a million in twenty casts.
    low, high = 0, len(part)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            part.slice(low, middle - low).cast(kind)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return int(rows[low]), str(part[low].as_py())


def _arrow_seconds(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    per_second = _PER_SECOND[column.type.unit]
    seconds: npt.NDArray[np.int64] = column.cast(pa.int64()).to_numpy() // per_second
    if len(seconds) and int(seconds.min()) < 0:
        raise ValueError(
            f"timestamp lies before 1970 in {int(np.count_nonzero(seconds < 0))} rows; allowed: 1970 and later"
        )
    return seconds


def _as_numbers(column: pa.ChunkedArray) -> npt.NDArray[np.integer | np.floating] | None:
    for kind in (pa.int64(), pa.float64()):
        try:
            numbers: npt.NDArray[np.integer | np.floating] = column.cast(kind).to_numpy()
        except pa.ArrowInvalid:
            continue
        return numbers
    return None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))
