"""Encodes the parts of a checkpoint (`squeeze`), or a complete checkpoint as a file with one checksum.

A file consists of magic, the SHA-256 of the rest, the header length, a JSON header (values, and each part's type, shape
and bounds) and the parts. Nothing is pickled.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

# Of the file around the parts; `FORMAT` is that of values and parts, in a file and in the topic.
MAGIC = b"FRESHET\x02"
FORMAT = 4
_SHA_BYTES = 32
_PREFIX = len(MAGIC) + _SHA_BYTES
_ALIGNMENT = 8

# Exceptions from decoding intact bytes that another program wrote.
MALFORMED = (KeyError, ValueError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)

Arrays = Mapping[str, npt.NDArray[Any]]


class CheckpointError(ValueError):
    """A checkpoint is torn, altered or of another format."""


def to_file(values: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """Encode a checkpoint's JSON values and its parts as one file."""
    where: dict[str, Any] = {}
    pieces: list[bytes] = []
    end = 0
    for name, data in parts.items():
        padding = -len(data) % _ALIGNMENT
        where[name] = ["uint8", [len(data)], end, end + len(data)]
        pieces += [data, b"\0" * padding]
        end += len(data) + padding
    header = json.dumps({"values": dict(values), "arrays": where}, sort_keys=True).encode()
    header += b" " * (-(len(header) + _PREFIX + 8) % _ALIGNMENT)
    body = b"".join([len(header).to_bytes(8, "little"), header, *pieces])
    return MAGIC + hashlib.sha256(body).digest() + body


def from_file(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The inverse of `to_file`. Raises: CheckpointError with the defect."""
    if not data.startswith(MAGIC) or len(data) < _PREFIX + 8:
        raise CheckpointError(
            f"no checkpoint of this format: {len(data)} bytes that begin with {data[:8]!r}; allowed: {MAGIC!r}"
        )
    body = memoryview(data)[_PREFIX:]
    written, found = data[len(MAGIC) : _PREFIX].hex(), hashlib.sha256(body).hexdigest()
    if written != found:
        raise CheckpointError(f"torn or altered: the content has sha256 {found}; the stored one is {written}")
    start = 8 + int.from_bytes(body[:8], "little")
    try:
        header = json.loads(bytes(body[8:start]))
        check_format(header["values"])  # parts of another format may be unreadable
        parts = {
            name: _part(body[start:], dtype, shape, begin, end)
            for name, (dtype, shape, begin, end) in header["arrays"].items()
        }
        return dict(header["values"]), parts
    except CheckpointError:
        raise
    except MALFORMED as exc:
        raise CheckpointError(f"intact, but not written by this program: {exc!r}") from exc


def check_format(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for values of another format."""
    if values.get("format") != FORMAT:
        raise CheckpointError(f"its format is {values.get('format')!r:.80}; this version reads {FORMAT}")


def _part(data: memoryview, dtype: str, shape: list[int], begin: int, end: int) -> bytes:
    if dtype != "uint8" or not 0 <= begin <= end <= len(data) or shape != [end - begin]:
        raise ValueError(f"{shape} of {dtype!r} at {begin} to {end}; allowed: uint8, bytes 0 to {len(data)}")
    return bytes(data[begin:end])


def squeeze(arrays: Arrays) -> bytes:
    """Encode arrays without a checksum.

    An integer takes 1, 2, 4 or 8 bytes, whichever the range of the array's values or differences needs.
    """
    where: dict[str, Any] = {}
    pieces: list[bytes] = []
    end = 0
    for name, array in arrays.items():
        base, first, small = _squeezed(array) if array.dtype == np.int64 and array.ndim == 1 else (0, None, array)
        data = np.ascontiguousarray(small).tobytes()
        where[name] = [array.dtype.name, small.dtype.name, list(small.shape), base, first, end, end + len(data)]
        pieces.append(data)
        end += len(data)
    header = json.dumps(where).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *pieces])


def unsqueeze(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """The inverse of `squeeze`."""
    start = 8 + int.from_bytes(data[:8], "little")
    found: dict[str, npt.NDArray[Any]] = {}
    for name, (dtype, small, shape, base, first, begin, end) in json.loads(data[8:start]).items():
        array = np.frombuffer(data, np.uint8, end - begin, start + begin).view(small).reshape(shape)
        if dtype != small:
            array = array.astype(dtype)
            array += base
            if first is not None:
                array[0] = first
                np.cumsum(array, out=array)
        found[name] = array
    return found


def _squeezed(array: npt.NDArray[np.int64]) -> tuple[int, int | None, npt.NDArray[Any]]:
    """Return (base, first, small). The array is base + small, or if first is not None, their running sum from first."""
    best: tuple[int, int | None, npt.NDArray[Any]] = (0, None, array)
    if not len(array):
        return best
    for first, values in ((None, array), (int(array[0]), np.diff(array, prepend=array[:1]))):
        base, top = int(values.min()), int(values.max())
        for dtype in (np.uint8, np.uint16, np.uint32):
            if top - base <= np.iinfo(dtype).max and np.dtype(dtype).itemsize < best[2].dtype.itemsize:
                best = (base, first, (values - base).astype(dtype))
    return best


def pack_text(words: list[str]) -> npt.NDArray[np.uint8]:
    """Encode words without NUL as one array."""
    return np.frombuffer("\0".join(words).encode(), np.uint8) if words else np.zeros(0, np.uint8)


def unpack_text(array: npt.NDArray[np.uint8], count: int) -> list[str]:
    """The inverse of `pack_text`, for `count` words."""
    words = array.tobytes().decode().split("\0") if count else []
    if len(words) != count:
        raise CheckpointError(f"{len(words)} words where {count} were expected")
    return words
