"""A checkpoint as bytes: named arrays and a few plain values under one checksum, so that half of one is never taken.

Layout: magic, SHA-256 of all that follows, header length, a JSON header (values, and each array's type, shape and
bounds), the arrays. No pickle. It knows neither files nor what the arrays mean.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"FRESHET\x01"
_DTYPES = frozenset(("uint8", "int64", "uint64", "float16", "float32", "float64"))
_SHA_BYTES = 32
_PREFIX = len(MAGIC) + _SHA_BYTES
_ALIGNMENT = 8

Arrays = Mapping[str, npt.NDArray[Any]]


class CheckpointError(ValueError):
    """A checkpoint is torn, was altered, or is of another format."""


def pack(values: Mapping[str, Any], arrays: Arrays) -> bytes:
    """One checkpoint. `values` must be JSON; arrays of the types above. Raises: ValueError for another type."""
    where: dict[str, Any] = {}
    pieces: list[bytes] = []
    end = 0
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"{name} has dtype {array.dtype}; allowed: {sorted(_DTYPES)}")
        data = np.ascontiguousarray(array).tobytes()
        padding = -len(data) % _ALIGNMENT
        where[name] = [array.dtype.name, list(array.shape), end, end + len(data)]
        pieces += [data, b"\0" * padding]
        end += len(data) + padding
    header = json.dumps({"values": dict(values), "arrays": where}, sort_keys=True).encode()
    header += b" " * (-(len(header) + _PREFIX + 8) % _ALIGNMENT)
    body = b"".join([len(header).to_bytes(8, "little"), header, *pieces])
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Values and arrays (read-only views of `data`). Raises: CheckpointError saying what is wrong."""
    if not data.startswith(MAGIC) or len(data) < _PREFIX + 8:
        raise CheckpointError(f"no checkpoint of this format: {len(data)} bytes that begin with {data[:8]!r}")
    body = memoryview(data)[_PREFIX:]
    written, found = data[len(MAGIC) : _PREFIX].hex(), hashlib.sha256(body).hexdigest()
    if written != found:
        raise CheckpointError(f"torn or altered: its content has sha256 {found}; it says {written}")
    length = int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8 : 8 + length]))
    start = _PREFIX + 8 + length
    arrays = {
        name: np.frombuffer(data, dtype, count=(end - begin) // np.dtype(dtype).itemsize, offset=start + begin).reshape(
            shape
        )
        for name, (dtype, shape, begin, end) in header["arrays"].items()
    }
    return header["values"], arrays


def pack_text(words: list[str]) -> npt.NDArray[np.uint8]:
    """Words without NUL as one array."""
    return np.frombuffer("\0".join(words).encode(), np.uint8) if words else np.zeros(0, np.uint8)


def unpack_text(array: npt.NDArray[np.uint8], count: int) -> list[str]:
    """The inverse of `pack_text`, for `count` words."""
    words = array.tobytes().decode().split("\0") if count else []
    if len(words) != count:
        raise CheckpointError(f"{len(words)} words where {count} were expected")
    return words
