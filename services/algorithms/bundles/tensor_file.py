"""Read safetensors files (with NumPy alone) and Arrow files.

Processes share the pages of a mapped file. Writing to the file changes the arrays; truncating it kills the process.
`changed_in_place` reports a modified file; replacing by rename is safe.
"""

import json
import math
import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.algorithms.bundles.model_manifest import BundleError

# A file up to this size is read, not mapped. States of about 150,000 items fit.
LOADED_BYTES = 64 << 20
# A Linux flag. Without it, Linux reserves memory for private writable pages, so files larger than memory cannot be
# mapped.
_MAP_NORESERVE = 0x4000
# Inode, size and modification time of this process's mapped files.
_mapped: dict[Path, tuple[int, int, int]] = {}
_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64, "I32": np.int32, "U8": np.uint8}


def read_tensors(path: Path, *, only: Collection[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """Return a safetensors file's arrays, mapped above LOADED_BYTES. Writing to an array never changes the file.

    only: return these arrays alone, not mapped; empty means all. Raises: BundleError for an invalid header, or an array
    beyond the end of the file.
    """
    written = _file_stamp(path)
    is_mapped = not only and written[1] > LOADED_BYTES
    if is_mapped:
        _mapped[path] = written
    places = {name: place for name, place in tensor_places(path).items() if not only or name in only}
    return {name: _read_tensor(path, *place, is_mapped=is_mapped) for name, place in places.items()}


def mapped_or_read(path: Path) -> pa.NativeFile:
    """Open an Arrow file, mapped above LOADED_BYTES. Raises: OSError."""
    written = _file_stamp(path)
    if written[1] <= LOADED_BYTES:
        return pa.BufferReader(path.read_bytes())
    _mapped[path] = written
    return pa.memory_map(str(path))


def changed_in_place() -> str:
    """Return a sentence that names a modified mapped file; "" if none was modified."""
    for path, before in list(_mapped.items()):
        try:
            now = _file_stamp(path)
        except OSError:
            del _mapped[path]  # removed or renamed: the mapping has the old content
            continue
        if now[0] == before[0] and now != before:
            return f"{path} was modified while in use; replace files by renaming, and restart this process"
    return ""


def _file_stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def tensor_places(path: Path) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Map each array's name to dtype, shape and byte offset in the file."""
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
            raise BundleError(f"{path}: {name} has {end - begin} bytes, up to byte {8 + length + end}; "
                              f"shape {shape} needs {wanted} and the file holds {size}")  # fmt: skip
        places[name] = (dtype, shape, 8 + length + begin)
    return places


def _read_tensor(
    path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, *, is_mapped: bool
) -> npt.NDArray[Any]:
    if 0 in shape:
        return np.zeros(shape, dtype)
    if not is_mapped:
        return np.fromfile(path, dtype, math.prod(shape), offset=offset).reshape(shape)
    with path.open("rb") as file:
        flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), 0, flags=flags, prot=access), offset)
