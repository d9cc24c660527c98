"""Write a folder with a manifest under a temporary name, then rename it."""

import errno
import json
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from services.algorithms.bundles.model_manifest import BundleError, FileEntry
from services.algorithms.bundles.sealed_files import MANIFEST, PAIR_GATE_ARRAYS, file_entry
from services.algorithms.scoring.states import ItemStates, PairGate


def folder_aside(target: Path) -> Path:
    """Make a temporary folder next to `target`. Raises: BundleError if `target` exists without a manifest."""
    if target.exists() and not (target / MANIFEST).is_file():
        raise BundleError(f"{target} exists and holds no {MANIFEST}; refusing to replace what is not a bundle")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    return aside


def require_target(target: Path) -> None:
    """Check, before long work begins, that a folder can be put at `target`. Raises: OSError with the path."""
    try:
        folder_aside(target).rmdir()
    except BundleError as exc:
        raise FileExistsError(errno.EEXIST, f"exists and holds no {MANIFEST}; allowed: a bundle", str(target)) from exc


def swap(aside: Path, target: Path) -> None:
    """Rename `aside` to `target`; replace an older folder."""
    older = target.with_name(f".{target.name}.older-{os.getpid()}")
    if target.exists():
        target.rename(older)
    aside.rename(target)
    shutil.rmtree(older, ignore_errors=True)


def put_file(root: Path, name: str, source: Path) -> FileEntry:
    """Copy a file to `name` in the folder, through a temporary file. Raises: BundleError if `name` points outside."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise BundleError(f"bundle {root}: file name {name!r} leaves the bundle")
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.resolve() != target.resolve():
        aside = target.with_name(f".{target.name}.writing")
        shutil.copyfile(source, aside)
        aside.replace(target)
    return file_entry(target)


def save_tensors(arrays: dict[str, Any], path: Path) -> None:
    """Write a safetensors file with the read and write permissions of its folder.

    The safetensors library makes files that only the owner can read, but containers run as another user.
    """
    save_file(arrays, path)
    path.chmod(path.parent.stat().st_mode & 0o666)


def save_states(states: ItemStates, path: Path) -> None:
    """Write the same bytes as `save_tensors`, without copying the arrays in memory."""
    header: dict[str, Any] = {}
    arrays, end = {"components": states.components, "gate": states.gate}, 0
    for name, array in arrays.items():
        if array is not None:
            begin, end = end, end + 4 * array.size
            header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in arrays.values():
            if array is not None:
                file.write(np.ascontiguousarray(array, np.float32).data)
    path.chmod(path.parent.stat().st_mode & 0o666)


def save_pair_gate(gate: PairGate, path: Path) -> None:
    save_tensors({name: np.ascontiguousarray(getattr(gate, name), np.float32) for name in PAIR_GATE_ARRAYS}, path)
