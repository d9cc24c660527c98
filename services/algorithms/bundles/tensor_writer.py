"""Write safetensors files slice by slice, for arrays too large to copy in memory, and flush them to disk."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import FileEntry

_NAMES = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32", "uint8": "U8"}
# The first array starts at a multiple of these bytes, for SIMD access to mapped rows.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SlicedTensor:
    """An array to write, given as slices of rows."""

    dtype: npt.DTypeLike
    shape: tuple[int, ...]
    slices: Iterable[npt.NDArray[Any]]

    @classmethod
    def whole(cls, array: npt.NDArray[Any]) -> "SlicedTensor":
        return cls(array.dtype, array.shape, [array])


def write_tensors(path: Path, tensors: Mapping[str, SlicedTensor]) -> FileEntry:
    """Write a new file and return its entry. Raises: ValueError if slices do not fill their shape."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        begin, end = end, end + dtype.itemsize * math.prod(tensor.shape)
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for data in (len(encoded).to_bytes(8, "little"), encoded):
            digest.update(data)
            file.write(data)
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"]
            written = 0
            for piece in tensor.slices:
                rows: npt.NDArray[Any] = np.ascontiguousarray(piece, tensor.dtype)
                digest.update(rows.data)
                file.write(rows.data)
                written += rows.nbytes
            if written != end - begin:
                raise ValueError(f"{path}: {name} of shape {tensor.shape} got {written} bytes; expected {end - begin}")
        file.flush()
        os.fsync(file.fileno())
        return FileEntry(sha256=digest.hexdigest(), bytes=file.tell())
