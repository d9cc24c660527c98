"""One call for data: a name, "auto", or a path becomes Interactions whose `source` says which it took.

"auto" prefers MovieLens-1M, then smaller MovieLens sets, then a download, and only then the built-in simulator, and
says so. A set asked for by name is never silently replaced by another.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from services.offline.archive.files import MANIFEST, is_archive

from .archive import read_archive
from .interactions import Interactions
from .locate import DatasetUnavailableError, Locator
from .movielens import MOVIELENS_NAMES, is_movielens, read_movielens
from .sequences import SEQUENCE_NAMES, is_sequences, read_sequences
from .simulator import SimulatorConfig, simulate
from .table import read_table

AUTO_ORDER = ("ml-1m", "ml-latest-small", "ml-100k")


def load_dataset(
    name: str | Path = "auto",
    root: str | Path | None = None,
    *,
    download: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Interactions:
    """Load a data set.

    `name`: "auto", "simulator", a MovieLens name (ml-1m, ml-latest-small, ml-100k, ml-10m, ml-20m, ml-25m, ml-32m), one
    of SEQUENCE_NAMES (order without times, never downloaded), or the path of a CSV or Parquet table (see `read_table`),
    of sequences (see `read_sequences`), of an archive's folder (see `read_archive`), or of a MovieLens folder or zip.
    `root`: the only folder to look in, instead of the usual ones. `download=False` keeps off the network. `environ`
    defaults to os.environ, read now.
    Raises: DatasetUnavailableError (a ValueError) when a named set cannot be had; ValueError when a file is not what
    it should be.
    """
    locator = Locator(
        root=None if root is None else Path(root),
        environ=os.environ if environ is None else environ,
        download=download,
    )
    if name == "simulator":
        return simulate(SimulatorConfig())
    if name == "auto":
        return _load_best(locator)
    if str(name) in (*MOVIELENS_NAMES, *SEQUENCE_NAMES):
        return _load_named(str(name), locator)
    return _load_path(Path(name))


def _load_best(locator: Locator) -> Interactions:
    for find in (locator.on_this_machine, locator.from_publisher):
        for name in AUTO_ORDER:
            located = find(name)
            if located is not None:
                return read_movielens(located.path, name=name, found=located.where)
    simulated = simulate(SimulatorConfig())
    reasons = "; ".join(dict.fromkeys(locator.tried)) or "no folder to look in"
    return replace(simulated, source=f"{simulated.source}. Real data could not be had: {reasons}")


def _load_named(name: str, locator: Locator) -> Interactions:
    located = locator.on_this_machine(name) or locator.from_publisher(name)
    if located is None:
        form = "folder" if name in SEQUENCE_NAMES else "folder or zip"
        raise DatasetUnavailableError(
            f"{name} could not be had: {'; '.join(locator.tried)}. Put its {form} where FRESHET_DATA points, "
            "or ask for the built-in simulator"
        )
    read = read_sequences if name in SEQUENCE_NAMES else read_movielens
    return read(located.path, name=name, found=located.where)


def _load_path(path: Path) -> Interactions:
    if not path.exists():
        allowed = ", ".join(("auto", "simulator", *MOVIELENS_NAMES, *SEQUENCE_NAMES))
        raise DatasetUnavailableError(
            f"data={str(path)!r} is neither a file nor a known name; allowed: {allowed}, or a path"
        )
    if is_movielens(path):
        return read_movielens(path, name=path.stem if path.is_file() else path.resolve().name)
    if is_sequences(path):
        return read_sequences(path)
    if is_archive(path):
        return read_archive(path)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without MovieLens ratings, sequences.parquet or {MANIFEST}; name one CSV or Parquet "
            "file"
        )
    return read_table(path)
