"""Array files for generation: safetensors with format number and checksum inside, so that a truncated file or another
version is rejected.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.tensor_file import read_tensors
from services.algorithms.bundles.tensor_writer import SlicedTensor, write_tensors

Arrays = dict[str, npt.NDArray[Any]]


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]], *, kind: str, version: int) -> None:
    """Write, flush, then rename into place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    aside.unlink(missing_ok=True)
    seal: Arrays = {"version": np.array([version], dtype=np.int64), "checksum": _checksum(arrays, kind, version)}
    sealed: Arrays = {**arrays, **seal}
    write_tensors(aside, {name: SlicedTensor.whole(array) for name, array in sealed.items()})
    aside.replace(path)


def read_arrays(path: Path, names: tuple[str, ...], *, kind: str, version: int) -> Arrays:
    """The memory-mapped arrays after a pass for the checksum (1.5 GB a second).

    Raises: BundleError, with both values, for a missing, truncated or altered file, or another version.
    """
    if not path.is_file():
        raise BundleError(f"{path} is missing; expected the {kind}")
    if path.stat().st_size < 8:
        raise BundleError(f"{path}: {path.stat().st_size} bytes; a {kind} is cut short")
    found = read_tensors(path)
    wanted = {*names, "version", "checksum"}
    if found.keys() != wanted:
        raise BundleError(f"{path}: holds {sorted(found)}; a {kind} holds {sorted(wanted)}")
    stated = found.pop("version").tolist()
    if stated != [version]:
        raise BundleError(f"{path}: {kind} version={stated}; this program reads version {version}")
    checksum = found.pop("checksum").tobytes()
    arrays = {name: found[name] for name in names}
    computed = _checksum(arrays, kind, version).tobytes()
    if checksum != computed:
        raise BundleError(f"{path}: checksum={checksum.hex()[:16]} stated, {computed.hex()[:16]} computed; altered")
    return arrays


def _checksum(arrays: Mapping[str, npt.NDArray[Any]], kind: str, version: int) -> npt.NDArray[np.uint8]:
    digest = hashlib.sha256(f"{kind} {version}".encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return np.frombuffer(digest.digest(), dtype=np.uint8).copy()
