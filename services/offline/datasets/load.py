"""One call for data: a name, "auto", or a path becomes Interactions whose `source` says which it took.

`read_data` also says what it found in a file: all commands read the same, and refuse the same.
"auto" prefers MovieLens-1M, then smaller MovieLens sets, then a download, and only then the built-in simulator, and
says so. A set asked for by name is never silently replaced by another.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from services.algorithms.bundles.event_schema import EventSchema
from services.offline.archive.files import MANIFEST, is_archive

from .archive import read_archive
from .interactions import Interactions
from .locate import DatasetUnavailableError, Locator
from .movielens import MOVIELENS_NAMES, is_movielens, read_movielens
from .sequences import SEQUENCE_NAMES, is_sequences, read_sequences
from .simulator import SimulatorConfig, simulate
from .table import read_table
from .validation import Reading, check, unreadable

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
    return read_data(name, root, download=download, environ=environ).accepted()


def read_data(
    name: str | Path = "auto",
    root: str | Path | None = None,
    *,
    schema: EventSchema | None = None,
    download: bool = True,
    environ: Mapping[str, str] | None = None,
    now_s: float | None = None,
) -> Reading:
    """As `load_dataset`, with what was found in a file of the caller's own (named sets are not searched for troubles).

    `schema` and `now_s` as in `check`. Raises: as `load_dataset`, but for errors of a file, which are findings.
    """
    locator = Locator(
        root=None if root is None else Path(root),
        environ=os.environ if environ is None else environ,
        download=download,
    )
    if name == "simulator":
        data = simulate(SimulatorConfig())
    elif name == "auto":
        data = _load_best(locator)
    elif str(name) in (*MOVIELENS_NAMES, *SEQUENCE_NAMES):
        data = _load_named(str(name), locator)
    else:
        return _read_path(Path(name), schema, now_s)
    return Reading.of(data)


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


def _read_path(path: Path, schema: EventSchema | None, now_s: float | None) -> Reading:
    if not path.exists():
        allowed = ", ".join(("auto", "simulator", *MOVIELENS_NAMES, *SEQUENCE_NAMES))
        raise DatasetUnavailableError(
            f"data={str(path)!r} is neither a file nor a known name; allowed: {allowed}, or a path"
        )
    try:
        if is_movielens(path):
            data = read_movielens(path, name=path.stem if path.is_file() else path.resolve().name)
        elif is_sequences(path):
            data = read_sequences(path)
        elif is_archive(path):
            data = read_archive(path)
        elif path.is_dir():
            wanted = f"MovieLens ratings, sequences.parquet or {MANIFEST}"
            raise ValueError(f"{path} is a folder without {wanted}; name one CSV or Parquet file")
        else:
            return read_table(path, schema=schema, now_s=now_s)
    except ValueError as exc:
        return unreadable(str(path), str(exc))
    # The stream has judged an archive's times.
    return Reading.of(data, check(data, schema=schema, now_s=math.inf if is_archive(path) else now_s))
