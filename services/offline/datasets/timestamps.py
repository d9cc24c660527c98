"""Convert event times to unix seconds; reject ambiguous units and formats.

Numbers, also as text, are seconds, milliseconds, microseconds or nanoseconds: the unit in which every row is between
1973 and 2100. Other text must be ISO 8601, UTC by default. Fractions of a second affect only the order.

Letters: N rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# 1973-03-03 and 2100-01-01. A smaller number could be a counter.
_EARLIEST_S = 100_000_000
_LATEST_S = 4_102_444_800
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_DATE = r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_CLOCK = r"[T ]([01]\d|2[0-3])(:[0-5]\d(:[0-5]\d)?)?"
_ZONE = r"(Z|[+-]\d{2}(:?[0-5]\d)?)$"
_FRACTION = r"^(.*:\d\d)\.(\d{1,9})\d*(.*)$"
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
NumberArray = npt.NDArray[np.integer | np.floating]


class TimestampError(ValueError):
    """Some times can't be read. rows (N,): whether a row's time can't be read. advice: the remedy."""

    def __init__(self, what: str, rows: BoolArray, advice: str) -> None:
        super().__init__(what)
        self.rows = rows
        self.advice = advice


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTimes:
    """Parsed times. seconds (N,): unix seconds, rounded down. order (N,): row indices sorted by time with fractions of
    a second, then by position in the file. unit: "s", "ms", "us", "ns" or "iso".
    """

    seconds: IntArray
    order: IntArray
    unit: str


def parse_timestamps(column: pa.ChunkedArray) -> ParsedTimes:
    """Read a column of times without nulls. Raises: TimestampError for rows that can't be read."""
    if not len(column):
        return ParsedTimes(seconds=np.zeros(0, dtype=np.int64), order=np.zeros(0, dtype=np.int64), unit="s")
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _from_arrow(column)
    if pa.types.is_string(kind):
        column = pc.utf8_trim_whitespace(column)
        numbers = _as_numbers(column)
        return _from_text(column) if numbers is None else _from_numbers(numbers)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _from_numbers((column.cast(pa.float64()) if pa.types.is_decimal(kind) else column).to_numpy())
    advice = "give numbers, ISO 8601 text, or a timestamp type"
    raise TimestampError(f"timestamp has type {kind}", np.ones(len(column), dtype=bool), advice)


def _from_numbers(numbers: NumberArray) -> ParsedTimes:
    advice = "give times as unix seconds, milliseconds, microseconds or nanoseconds, or as ISO 8601"
    _refuse("negative, NaN or infinite", ~np.isfinite(numbers) | (numbers < 0), numbers, advice)
    fits = {
        name: (numbers >= _EARLIEST_S * per_second) & (numbers <= _LATEST_S * per_second)
        for name, per_second in _PER_SECOND.items()
    }
    unit = max(fits, key=lambda name: int(np.count_nonzero(fits[name])))
    what = f"outside 1973 to 2100 in {unit}, the unit of most rows" if fits[unit].any() else "not a unix time"
    _refuse(what, ~fits[unit], numbers, advice + "; one unit per column; add 1000000000 to a counter")
    if np.issubdtype(numbers.dtype, np.integer):
        seconds = numbers.astype(np.int64) // _PER_SECOND[unit]
    else:
        seconds = np.floor(numbers / _PER_SECOND[unit]).astype(np.int64)
    return ParsedTimes(seconds=seconds, order=np.argsort(numbers, kind="stable"), unit=unit)


def _from_text(text: pa.ChunkedArray) -> ParsedTimes:
    # Arrow rejects fractions finer than its unit. It parses text with a time zone only to a type with a time zone.
    digits = pc.replace_substring_regex(text, f"{_FRACTION}|^.*$", r"\2")
    text = pc.replace_substring_regex(text, _FRACTION, r"\1\3")
    zoned = pc.match_substring_regex(text, f"{_DATE}{_CLOCK}{_ZONE}").to_numpy(zero_copy_only=False)
    plain = pc.match_substring_regex(text, f"{_DATE}({_CLOCK})?$").to_numpy(zero_copy_only=False)
    months = np.array(pc.utf8_slice_codeunits(text.filter(pa.array(zoned | plain)), 0, 7).to_pylist(), dtype="M8[M]")
    days = pc.utf8_slice_codeunits(text.filter(pa.array(zoned | plain)), 8, 10).cast(pa.int64()).to_numpy()
    unreadable = ~(zoned | plain)
    unreadable[~unreadable] = days > ((months + 1).astype("M8[D]") - months.astype("M8[D]")).astype(np.int64)
    advice = (
        "write 2021-03-05T12:00:00Z; day and month orders are not guessed, numbers and dates may not be mixed in a "
        "column"
    )
    numeric = pc.match_substring_regex(text, _NUMBER).to_numpy(zero_copy_only=False)
    if 2 * np.count_nonzero(numeric) > len(text):
        _refuse("not a number, though most rows are", ~numeric, text, advice)
    _refuse("not ISO 8601", unreadable, text, advice)
    seconds = np.zeros(len(text), dtype=np.int64)
    for rows, kind in ((zoned, pa.timestamp("s", "UTC")), (plain, pa.timestamp("s"))):
        seconds[rows] = text.filter(pa.array(rows)).cast(kind).cast(pa.int64()).to_numpy()
    _refuse("before 1970", seconds < 0, text, "give times of 1970 and later")
    nanoseconds = pc.utf8_rpad(digits, 9, "0").cast(pa.int64()).to_numpy()
    return ParsedTimes(seconds=seconds, order=np.lexsort((nanoseconds, seconds)), unit="iso")


def _from_arrow(column: pa.ChunkedArray) -> ParsedTimes:
    times = column.cast(pa.timestamp("ms")) if pa.types.is_date(column.type) else column
    ticks: IntArray = times.cast(pa.int64()).to_numpy()
    _refuse("before 1970", ticks < 0, ticks, "give times of 1970 and later")
    return ParsedTimes(
        seconds=ticks // _PER_SECOND[times.type.unit], order=np.argsort(ticks, kind="stable"), unit="iso"
    )


def _refuse(what: str, rows: BoolArray, values: NumberArray | pa.ChunkedArray, advice: str) -> None:
    if rows.any():
        raise TimestampError(f"timestamp is {what} (first: {values[int(np.argmax(rows))]})", rows, advice)


def _as_numbers(column: pa.ChunkedArray) -> NumberArray | None:
    for kind in (pa.int64(), pa.float64()):
        try:
            numbers: NumberArray = column.cast(kind).to_numpy()
        except pa.ArrowInvalid:
            continue
        return numbers
    return None
