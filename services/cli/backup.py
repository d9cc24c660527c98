"""Writes, verifies and restores backups of a model's bundle, the refresher's checkpoints and the stream's positions.

A backup set is a folder with `bundle/`, `checkpoints/` and `manifest.json`, which is written last. The manifest lists
every file's size and SHA-256 and has a checksum of itself. Incomplete copies, changed bytes and files of two backups
are therefore rejected. A checkpoint file contains its position, so it is complete even while the refresher runs. The
set does not contain Kafka's log: a restored checkpoint continues from its position there.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.algorithms.bundles.model_bundle import BundleError, load_bundle
from services.algorithms.bundles.sealed_files import file_entry
from services.refresher.adapters.checkpoint_topic import CheckpointFiles
from services.refresher.checkpoint import CheckpointError, to_file
from services.refresher.ports import StoredCheckpoint

MANIFEST = "manifest.json"
FORMAT = 1


class BackupError(ValueError):
    """A set is incomplete, altered or of another format, or its parts do not belong together."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Positions in the stream's topics.

    attributions: maps each partition to its checkpoint's offset.
    interactions, epoch: the values in Redis during the backup. They are empty and None if Redis did not answer.
    """

    attributions: Mapping[int, int]
    interactions: Mapping[int, int] = field(default_factory=dict)
    epoch: str | None = None


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A verified backup set. `files` maps each relative path to (bytes, SHA-256)."""

    folder: Path
    model_version: str
    created: str
    positions: Positions
    files: Mapping[str, tuple[int, str]]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def describe(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return {
            "folder": str(self.folder),
            "model_version": self.model_version,
            "created": self.created,
            "files": len(self.files),
            "bytes": self.nbytes,
            "positions": asdict(self.positions),
        }


def make_backup(
    folder: Path,
    *,
    bundle: Path,
    checkpoints: Callable[[int], Iterable[StoredCheckpoint]],
    partitions: Collection[int],
    interactions: Mapping[int, int],
    epoch: str | None,
) -> Backup:
    """Copy `bundle` and its model's checkpoints into `folder`, which must not exist.

    `checkpoints` returns a partition's checkpoints, newest first. `partitions` are the partitions of the topic
    `attributions`. For interactions and epoch see `Positions`. A failed copy leaves no folder.
    Raises: BackupError for an existing folder, a damaged bundle, or a partition whose checkpoints are all damaged.
    """
    if folder.exists():
        raise BackupError(f"{folder} exists already; name a folder that does not")
    version = _bundle_version(bundle)
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        shutil.copytree(bundle, aside / "bundle")
        (aside / "checkpoints").mkdir()
        attributions = {}
        for number, (data, offset) in _newest_whole(checkpoints, partitions):
            (aside / "checkpoints" / f"partition-{number}.checkpoint").write_bytes(data)
            attributions[number] = offset
        # The copy is opened again: it fails its checksums if the bundle was replaced during the copy.
        if (copied := _bundle_version(aside / "bundle")) != version:
            raise BackupError(f"the bundle was replaced while it was copied: {version} before, {copied} after")
        positions = Positions(attributions=attributions, interactions=dict(interactions), epoch=epoch)
        _write_manifest(aside, version, positions)
        aside.rename(folder)
    except OSError as exc:
        raise BackupError(f"{folder} cannot be written: {exc}") from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return read_backup(folder)


def read_backup(folder: Path) -> Backup:
    """Verify a set's manifest, files, bundle and checkpoints. Raises: BackupError naming the defect."""
    manifest = _read_manifest(folder)
    try:
        found = TypeAdapter(Backup).validate_json(json.dumps(manifest | {"folder": str(folder)}), strict=True)
    except ValidationError as exc:
        problem = exc.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise BackupError(
            f"{folder / MANIFEST} is not what `freshet backup` writes: {where}: {problem['msg']}"
        ) from exc
    named, version, positions = found.files, found.model_version, found.positions
    paths = {str(path.relative_to(folder)): path for path in _files(folder)}
    if missing := sorted(named.keys() - paths.keys()):
        raise BackupError(f"{folder} is torn: {missing[0]} is missing ({len(missing)} of {len(named)} files)")
    if unknown := sorted(paths.keys() - named.keys()):
        raise BackupError(f"{folder} holds {unknown[0]}, which its manifest does not name")
    for name, (size, digest) in named.items():
        actual = _sha256(paths[name])
        if actual != (size, digest):
            raise BackupError(
                f"{folder / name} has {actual[0]} bytes and sha256 {actual[1]}; its manifest says {size} and {digest}"
            )
    if (bundled := _bundle_version(folder / "bundle")) != version:
        raise BackupError(f"{folder} mixes models: its bundle is {bundled}, its manifest says {version}")
    own = CheckpointFiles(folder / "checkpoints")
    names = [path.stem.removeprefix("partition-") for path in (folder / "checkpoints").glob("partition-*.*")]
    numbers = {int(name) for name in names if name.isdecimal()}
    checkpointed = {number: offset for number, (_, offset) in _newest_whole(own.load, numbers)}
    if checkpointed != positions.attributions:
        ends = dict(positions.attributions)
        raise BackupError(f"{folder} mixes moments: its checkpoints end at {checkpointed}, its manifest says {ends}")
    return found


def restore_backup(
    backup: Backup, *, bundle: Path, checkpoints: Path, ends: Mapping[int, int] | None, replace: bool = False
) -> list[str]:
    """Install a verified set; return one sentence for each folder that was renamed.

    `ends` maps each partition of `attributions` to its present end; None means that Kafka did not answer. With
    `replace`, existing folders are renamed to `<name>.before-<when>`.
    Raises: BackupError if the log ends before a checkpoint's position, or if files exist and `replace` is false.
    """
    if ends is not None:
        _require_log(backup.positions.attributions, ends)
    folder = checkpoints / backup.model_version
    in_the_way = [path for path in (bundle, folder) if path.exists() and any(path.iterdir())]
    if in_the_way and not replace:
        raise BackupError(f"{in_the_way[0]} is not empty; --replace sets it aside")
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    notes = []
    for source, target in ((backup.folder / "bundle", bundle), (backup.folder / "checkpoints", folder)):
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copytree(source, aside)
            if target.exists():
                before = target.with_name(f"{target.name}.before-{when}")
                target.rename(before)
                notes.append(f"what was at {target} is now at {before}")
            aside.rename(target)
        except OSError as exc:
            raise BackupError(f"{target} cannot be written: {exc}") from exc
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return notes


def _require_log(offsets: Mapping[int, int], ends: Mapping[int, int]) -> None:
    for number, offset in sorted(offsets.items()):
        end = ends.get(number)
        if end is None or offset >= end:
            found = "does not exist" if end is None else f"ends before offset {end}"
            raise BackupError(
                f"the checkpoint of partition {number} has folded attributions up to offset {offset}, but that "
                f"partition {found}: it is another log; `freshet rebuild` makes checkpoints of the present log"
            )


def _bundle_version(bundle: Path) -> str:
    try:
        return load_bundle(bundle).model_version
    except BundleError as exc:
        raise BackupError(str(exc)) from exc


def _newest_whole(
    load: Callable[[int], Iterable[StoredCheckpoint]], partitions: Collection[int]
) -> Iterator[tuple[int, tuple[bytes, int]]]:
    """Yield each partition's number with its newest complete checkpoint, as the file's bytes and the offset."""
    for number in sorted(partitions):
        problems = []
        for checkpoint in load(number):
            try:
                values, parts = checkpoint.read()
            except CheckpointError as exc:
                problems.append(f"{checkpoint.name}: {exc}")
                continue
            partition, offset = values.get("partition"), values.get("folded_offset")
            if partition != number or type(offset) is not int:
                raise BackupError(f"{checkpoint.name} is of partition {partition!r:.40} up to offset {offset!r:.40}")
            yield number, (to_file(values, parts), offset)
            break
        else:
            if problems:
                raise BackupError("; ".join(problems))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST)


def _sha256(path: Path) -> tuple[int, str]:
    entry = file_entry(path)
    return entry.bytes, entry.sha256


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_manifest(folder: Path, version: str, positions: Positions) -> None:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "model_version": version,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "positions": json.loads(json.dumps(asdict(positions))),
        "files": {str(path.relative_to(folder)): list(_sha256(path)) for path in _files(folder)},
    }
    manifest["sha256"] = _own_checksum(manifest)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written, found = manifest["sha256"], _own_checksum(manifest)
    except FileNotFoundError as exc:
        raise BackupError(f"{folder} is no backup, or a torn one: it has no {MANIFEST}") from exc
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise BackupError(f"{folder / MANIFEST} cannot be read: {exc!r}") from exc
    if written != found:
        raise BackupError(f"{folder / MANIFEST} has sha256 {found}; it says {written}")
    if manifest.get("format") != FORMAT:
        raise BackupError(f"{folder} has format {manifest.get('format')}; this version reads {FORMAT}")
    return manifest
