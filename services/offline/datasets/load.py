"""Load Interactions by data set name, by path, or with the name "auto".

All commands use `read_data`, so all reject the same files. "auto" tries MovieLens-1M, then smaller MovieLens sets,
then a download, and last the simulator. A named set is never replaced by another.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.algorithms.bundles.event_schema import EventSchema
from services.offline.archive.files import MANIFEST, is_archive

from .archive import read_archive
from .catalogue_file import read_catalogue
from .columns import TableOptions
from .interactions import Interactions
from .locate import DatasetUnavailableError, Locator
from .movielens import MOVIELENS_NAMES, is_movielens, read_movielens
from .sequences import SEQUENCE_NAMES, is_sequences, read_sequences
from .simulator import SimulatorConfig, simulate
from .table import read_table
from .validation import Finding, Reading, Severity, check, some, unreadable, worst_first

_AS_USUAL = TableOptions()
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
    of SEQUENCE_NAMES (events without times), or the path of a table (`read_table`), sequences (`read_sequences`), an
    archive (`read_archive`), or a MovieLens folder or zip. `root`: the only folder to search. `environ`: os.environ by
    default.
    Raises: DatasetUnavailableError (a ValueError) if the set or path is unavailable; ValueError for an invalid file.
    """
    return read_data(name, root, download=download, environ=environ).accepted()


def read_data(
    name: str | Path = "auto",
    root: str | Path | None = None,
    *,
    schema: EventSchema | None = None,
    table: TableOptions = _AS_USUAL,
    download: bool = True,
    environ: Mapping[str, str] | None = None,
    now_s: float | None = None,
) -> Reading:
    """Load like `load_dataset`, with the problems found in the caller's own file (named sets are not checked).

    `schema`, `now_s`: see `check`. `table`: how to read a table; its items file applies to all data.
    Raises: the errors of `load_dataset`, except that errors in a file become findings; ValueError if columns are named
    and the data is not a table.
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
        return with_items(_read_path(Path(name), schema, table, now_s), table)
    _require_no_columns(name, table)
    return with_items(Reading.of(data), table)


def with_items(reading: Reading, table: TableOptions) -> Reading:
    """Return the reading with the items file's titles, categories, findings and `catalogue`."""
    if table.items is None:
        return reading
    try:
        catalogue = read_catalogue(table.items, table.separator)
    except ValueError as exc:
        # An error in the items file also makes the data unusable.
        findings = [*reading.findings, *unreadable(str(table.items), str(exc)).findings]
        return replace(reading, findings=worst_first(findings), interactions=None)
    data, findings = reading.interactions, list(reading.findings)
    if catalogue.texts:
        advice = "no filter reads text or URLs, and the bundle does not keep them"
        what = "columns of items are left out"
        findings.append(_of_items(catalogue.texts, len(catalogue.texts), "info", what, advice))
    if data is not None:
        rows = [catalogue.rows.get(item_id) for item_id in data.item_ids]
        lacking = [item_id for item_id, row in zip(data.item_ids, rows, strict=True) if row is None]
        if lacking:
            advice = "they have no attribute, so no condition holds for them; add them to the file"
            what = f"items that {table.items.name} lacks"
            findings.append(_of_items(lacking, data.num_items, "warning", what, advice))
        if idle := sorted(catalogue.rows.keys() - set(data.item_ids)):
            advice = "a model knows items by events: announce these with `freshet items put --file`"
            findings.append(_of_items(idle, len(catalogue.rows), "info", "items without an event", advice))
        data = replace(
            data,
            titles=[
                title if row is None else catalogue.titles[row] or title
                for title, row in zip(data.titles, rows, strict=True)
            ],
            categories=[
                own if row is None else catalogue.categories[row] or own
                for own, row in zip(data.categories, rows, strict=True)
            ],
        )
    read_as = "\n".join(filter(None, [reading.read_as, catalogue.read_as]))
    return replace(reading, findings=worst_first(findings), interactions=data, catalogue=catalogue, read_as=read_as)


def _of_items(names: Sequence[str], of: int, severity: Severity, what: str, advice: str) -> Finding:
    return Finding(severity=severity, what=what, where=some(names), count=len(names), of=of, advice=advice)


def _require_no_columns(name: str | Path, table: TableOptions) -> None:
    if table.columns:
        named = ", ".join(f"{role}={column}" for role, column in table.columns.items())
        raise ValueError(f"columns {named} are named, and {name} is no table; allowed: a CSV or Parquet file")


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


def _read_path(path: Path, schema: EventSchema | None, table: TableOptions, now_s: float | None) -> Reading:
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
            return read_table(path, table, schema=schema, now_s=now_s)
    except ValueError as exc:
        return unreadable(str(path), str(exc))
    _require_no_columns(path, table)
    # An archive's times were checked when its events entered the stream.
    return Reading.of(data, check(data, schema=schema, now_s=math.inf if is_archive(path) else now_s))
