"""Strings as a column: their concatenated UTF-8 and the end of each, in possibly mapped arrays (decision 087).

Letters: n strings, m requested rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_DECODED = 65_536  # strings decoded at a time: some megabytes
_PADDED_BYTES = 1 << 20
_FEW = 16  # fewer rows are handled one by one: NumPy calls take longer
_LOWER = np.frombuffer(bytes(range(256)).lower(), np.uint8)


class Strings(Sequence[str]):
    """String i is data[ends[i - 1]:ends[i]], of data (bytes,) and ends (n,). Equal to any sequence of equal strings."""

    __slots__ = ("data", "ends")

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[Any]) -> None:
        """Raise ValueError for ends that decrease or do not fit the data."""
        if data.dtype != np.uint8 or ends.dtype.kind != "i" or data.ndim != 1 or ends.ndim != 1:
            raise ValueError(f"strings of {data.dtype} {data.shape} that end at {ends.dtype} {ends.shape}")
        last = int(ends[-1]) if len(ends) else 0
        if last != len(data) or (len(ends) and int(ends[0]) < 0):
            raise ValueError(f"strings of {len(data)} bytes that end at {last}")
        for start in range(0, len(ends) - 1, 1 << 20):
            part = ends[start : start + (1 << 20) + 1]
            if (part[1:] < part[:-1]).any():
                row = start + 1 + int(np.flatnonzero(part[1:] < part[:-1])[0])
                raise ValueError(f"string {row} ends at {int(ends[row])}, before string {row - 1}")
        self.data, self.ends = data, ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> "Strings":
        """Make a column. Raises: ValueError with a string that is not UTF-8."""
        if isinstance(strings, Strings):
            return strings
        encoded = []
        for one in strings:
            try:
                encoded.append(one.encode())
            except UnicodeEncodeError as exc:
                raise ValueError(f"{one!r} is not UTF-8") from exc
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        return cls(np.frombuffer(b"".join(encoded), np.uint8), _narrow(ends))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]], name: str) -> "Strings":
        """Read a column. Raises: KeyError if it is missing, ValueError with its name if it is invalid."""
        try:
            found = cls(tensors[name], tensors[f"{name}_ends"])
            found.check()
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from exc
        return found

    def tensors(self, name: str) -> dict[str, npt.NDArray[Any]]:
        return {name: self.data, f"{name}_ends": self.ends}

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} strings")
        row %= len(self)
        return self.data[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for _, data, ends in self._parts():
            yield from _cut(data.tobytes(), ends)

    def encoded(self) -> Iterator[bytes]:
        for _, data, ends in self._parts():
            text = data.tobytes()
            yield from (text[at:end] for at, end in pairwise([0, *ends.tolist()]))

    def _parts(self) -> Iterator[tuple[int, npt.NDArray[np.uint8], Indices]]:
        """First row, bytes and ends of `_DECODED` strings at a time."""
        for start in range(0, len(self), _DECODED):
            first = int(self.ends[start - 1]) if start else 0
            ends = self.ends[start : start + _DECODED].astype(np.int64) - first
            yield start, self.data[first : first + int(ends[-1])], ends

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings):
            return np.array_equal(self.ends, other.ends) and np.array_equal(self.data, other.data)
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Strings({list(self[:3])!r:.80}, {len(self)} of them)"

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.ends.nbytes)

    @property
    def lengths(self) -> Indices:
        return np.diff(self.ends, prepend=np.zeros(1, self.ends.dtype)).astype(np.int64)

    def take(self, rows: npt.NDArray[np.integer[Any]] | Sequence[int]) -> list[str]:
        """The strings of m rows, in order."""
        if len(rows) < _FEW:
            data, ends, wanted = self.data, self.ends, np.asarray(rows, np.int64).tolist()
            return [data[ends[row - 1] if row else 0 : ends[row]].tobytes().decode() for row in wanted]
        data, ends = self._gathered(np.asarray(rows, np.int64))
        return list(_cut(data.tobytes(), ends))

    def taken(self, rows: npt.NDArray[np.integer[Any]] | Sequence[int]) -> "Strings":
        """A copied column of m rows."""
        wanted = np.asarray(rows, np.int64)
        parts = [self._gathered(wanted[start : start + _DECODED]) for start in range(0, len(wanted), _DECODED)]
        return _together(parts)

    def are(self, rows: Indices, wanted: Sequence[str]) -> bool:
        """Whether the strings of m rows equal `wanted`. Many rows are compared without decoding."""
        if len(rows) < _FEW:
            return self.take(rows) == list(wanted)
        data, ends = self._gathered(rows)
        text = "".join(wanted)
        if data.tobytes() != text.encode():
            return False
        lengths = map(len, wanted if text.isascii() else [one.encode() for one in wanted])
        return bool(ends.tolist() == list(accumulate(lengths)))

    def same(self, rows: Indices, others: "Strings", their_rows: Indices) -> bool:
        """Whether the strings of m rows equal those of m rows of `others`."""
        (data, ends), (their_data, their_ends) = self._gathered(rows), others._gathered(their_rows)
        return np.array_equal(ends, their_ends) and np.array_equal(data, their_data)

    def starting(self, rows: Indices, prefix: bytes) -> npt.NDArray[np.bool_]:
        """Which strings of m rows begin with `prefix` (lower case), ignoring ASCII case: (m,)."""
        starts = np.where(rows > 0, self.ends[rows - 1], 0).astype(np.int64)
        passes = self.ends[rows] - starts >= len(prefix)
        found = _LOWER[self.data[starts[passes, None] + np.arange(len(prefix))]]
        passes[passes] = (found == np.frombuffer(prefix, np.uint8)).all(axis=1)
        return passes

    def check(self) -> None:
        """Raise ValueError with the row unless each string is UTF-8."""
        for start, data, ends in self._parts():
            begins = np.concatenate([[0], ends[:-1]])
            inside = begins[begins < ends]
            # No string may begin inside a character of the string before.
            is_whole = (data[inside] & 0xC0 != 0x80).all() and _is_utf8(data.tobytes())
            if not is_whole:
                wrong = next(
                    row for row, (at, end) in enumerate(pairwise([0, *ends.tolist()]))
                    if not _is_utf8(data[at:end].tobytes())
                )  # fmt: skip
                raise ValueError(f"string {start + wrong} is not UTF-8")

    def order(self) -> Indices:
        """Rows in the order of their strings, by code points (n,)."""
        if self.is_ascending():
            return np.arange(len(self))
        # During the sort a string takes 16 bytes, a long one more.
        strings = np.empty(len(self), np.dtypes.StringDType())
        for start in range(0, len(self), _DECODED):
            strings[start : start + _DECODED] = self[start : start + _DECODED]
        return np.argsort(strings, kind="stable")

    def is_ascending(self) -> bool:
        """Whether the strings strictly ascend by code points, the order of UTF-8 bytes."""
        width = 1 + int(self.lengths.max(initial=0))
        step = max(1, _PADDED_BYTES // width)
        for start in range(0, len(self) - 1, step):
            data, ends = self._gathered(np.arange(start, min(start + step + 1, len(self))))
            lengths = np.diff(ends, prepend=0)
            padded = np.zeros((len(ends), width), np.uint8)
            padded[np.arange(width) < lengths[:, None]] = data
            strings = padded.view(f"S{width}")[:, 0]
            # NumPy ignores NUL bytes at the end, so lengths are compared, too.
            is_prefix = (strings[:-1] == strings[1:]) & (lengths[:-1] < lengths[1:])
            if not ((strings[:-1] < strings[1:]) | is_prefix).all():
                return False
        return True

    def _gathered(self, rows: Indices) -> tuple[npt.NDArray[np.uint8], Indices]:
        starts = np.where(rows > 0, self.ends[rows - 1], 0).astype(np.int64) if len(rows) else np.zeros(0, np.int64)
        lengths = self.ends[rows] - starts
        ends = np.cumsum(lengths, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if len(rows) and total == int(self.ends[rows[-1]]) - int(starts[0]) and (rows[1:] - rows[:-1] == 1).all():
            return self.data[int(starts[0]) : int(starts[0]) + total], ends
        return self.data[np.arange(total) + np.repeat(starts - (ends - lengths), lengths)], ends


def joined(columns: Sequence[Strings]) -> Strings:
    return _together([(one.data, one.ends.astype(np.int64)) for one in columns])


def _together(parts: Sequence[tuple[npt.NDArray[np.uint8], Indices]]) -> Strings:
    starts = np.cumsum([0, *(len(data) for data, _ in parts)])
    ends = [part + start for (_, part), start in zip(parts, starts.tolist(), strict=False)]
    return Strings(
        np.concatenate([np.zeros(0, np.uint8), *(data for data, _ in parts)]),
        _narrow(np.concatenate([np.zeros(0, np.int64), *ends])),
    )


def _narrow(ends: Indices) -> npt.NDArray[Any]:
    return ends.astype(np.int32) if not len(ends) or ends[-1] < 2**31 else ends


def _cut(data: bytes, ends: Indices) -> Iterator[str]:
    places = pairwise([0, *ends.tolist()])
    if data.isascii():
        text = data.decode("ascii")
        return (text[start:end] for start, end in places)
    return (data[start:end].decode() for start, end in places)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
