"""Reading safetensors files by memory mapping, with NumPy alone.

The library's NumPy reader copies every array; item states are the largest thing that a serving process holds, and the
mapped pages are shared between processes. The format: 8 bytes of header length, a JSON header, then the arrays.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.manifest import BundleError

_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64, "I32": np.int32, "U8": np.uint8}


def read_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a safetensors file, memory-mapped: writing to one changes this process's copy, never the file.

    Raises: BundleError if the header is not one or an array runs past the end of the file.
    """
    return {name: _map_tensor(path, *place) for name, place in tensor_places(path).items()}


def tensor_places(path: Path) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Name -> (dtype, shape, byte offset in the file)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise BundleError(f"{path}: header length={length}; the file holds {size} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as exc:
            raise BundleError(f"{path}: not a safetensors file ({exc})") from exc
    if not isinstance(header, dict):
        raise BundleError(f"{path}: the header is a JSON {type(header).__name__}; expected an object")
    places = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape, (begin, end) = tensor["dtype"], tuple(tensor["shape"]), tensor["data_offsets"]
        except (KeyError, TypeError, ValueError) as exc:
            raise BundleError(f"{path}: {name} needs dtype, shape and two data_offsets; found {tensor!r:.80}") from exc
        if not isinstance(kind, str) or kind not in _DTYPES:
            raise BundleError(f"{path}: {name} has dtype {kind!r:.80}; allowed: {sorted(_DTYPES)}")
        if not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)):
            raise BundleError(f"{path}: {name} has shape {shape} at {begin} to {end}; allowed: whole numbers from 0")
        dtype = np.dtype(_DTYPES[kind])
        wanted = math.prod(shape) * dtype.itemsize
        if end - begin != wanted or 8 + length + end > size:
            raise BundleError(f"{path}: {name} spans {end - begin} bytes to {8 + length + end}; "
                              f"shape {shape} needs {wanted} and the file holds {size}")  # fmt: skip
        places[name] = (dtype, shape, 8 + length + begin)
    return places


def _map_tensor(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> npt.NDArray[Any]:
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="c", offset=offset, shape=shape))
