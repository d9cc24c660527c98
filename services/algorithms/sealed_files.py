"""Folders whose every file is listed with size and checksum, and how one is put into place whole.

What the model bundle and the text bundle share. It knows nothing of what the files hold.
"""

import hashlib
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors.numpy import save_file

from services.algorithms.manifest import BundleError, FileEntry

MANIFEST = "manifest.json"


def check_file(root: Path, name: str, entry: FileEntry, *, verify: bool) -> None:
    """Raises: BundleError if the file is missing or has another size or, with `verify`, another checksum."""
    path = root / name
    if not path.is_file():
        raise BundleError(f"{path} is missing; {MANIFEST} lists it with {entry.bytes} bytes")
    found = path.stat().st_size
    if found != entry.bytes:
        raise BundleError(f"{path} holds {found} bytes; {MANIFEST} says {entry.bytes}")
    if verify and (checksum := _sha256(path)) != entry.sha256:
        raise BundleError(f"{path} has sha256 {checksum}; {MANIFEST} says {entry.sha256}")


def file_entry(path: Path) -> FileEntry:
    return FileEntry(sha256=_sha256(path), bytes=path.stat().st_size)


def save_tensors(arrays: dict[str, Any], path: Path) -> None:
    """Write a safetensors file that whoever may enter its folder can read: the library's own is its owner's alone, and
    a container runs as another user."""
    save_file(arrays, path)
    path.chmod(path.parent.stat().st_mode & 0o666)


def put_file(root: Path, name: str, source: Path) -> FileEntry:
    """Copy a file to `name` in the folder, aside and renamed. Raises: BundleError if the name leaves the folder."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise BundleError(f"bundle {root}: file name {name!r} leaves the bundle")
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.resolve() != target.resolve():
        aside = target.with_name(f".{target.name}.writing")
        shutil.copyfile(source, aside)
        aside.replace(target)
    return file_entry(target)


def folder_aside(target: Path) -> Path:
    """A fresh folder beside `target` to write into. Raises: BundleError if `target` exists and holds no manifest."""
    if target.exists() and not (target / MANIFEST).is_file():
        raise BundleError(f"{target} exists and holds no {MANIFEST}; refusing to replace what is not a bundle")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    return aside


def swap(aside: Path, target: Path) -> None:
    """Rename `aside` to `target`; an older folder there is renamed away first and removed after."""
    older = target.with_name(f".{target.name}.older-{os.getpid()}")
    if target.exists():
        target.rename(older)
    aside.rename(target)
    shutil.rmtree(older, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
