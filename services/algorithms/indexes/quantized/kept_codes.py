"""Codes kept on disk: a start maps what an earlier one trained and coded, instead of doing so again.

    codes-<items>-<part>-<sizes>.safetensors   and beside it its checksum, .json

One file for each `part` that an index codes, of the items that the folder was asked for, written aside and renamed.
Ten million items of the quick shape take 76 s to code on two cores, and 1 s to check and map; the pages that are mapped
are shared by processes on one machine. What is not whole, or holds something else than its name says, is made anew.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_manifest import BundleError, FileEntry
from services.algorithms.bundles.sealed_files import check_file
from services.algorithms.bundles.tensor_file import read_tensors
from services.algorithms.bundles.tensor_writer import SlicedTensor, write_tensors
from services.algorithms.ops.quantized_scan import Codes, Coding
from services.algorithms.ops.quantized_scan.cells import FloatMatrix

FORMAT = 1
KEPT = 2  # sets of items whose codes stay: those in use, and those to go back to


class KeptCodes:
    """The coder of one set of items, `of`, whose codes lie below a folder.

    `writes` False: it only takes them. `report` hears what became of each part: an event, `path`, and why.
    """

    def __init__(
        self, root: Path, *, of: str, writes: bool = True, report: Callable[..., object] = lambda event, **said: None
    ) -> None:
        self._root, self._of, self._writes = root, hashlib.sha256(of.encode()).hexdigest()[:16], writes
        self._report = report

    def __call__(self, part: str, vectors: Callable[[], FloatMatrix], /, *, cells: Coding[Codes], seed: int) -> Codes:
        """The codes of `part`, from the folder or made of its vectors (X, d) and put there."""
        path = self._root / f"codes-{self._of}-{part}-{cells.text}-{seed}-v{FORMAT}.safetensors"
        entry = path.with_suffix(".json")
        if entry.exists():
            try:
                codes = _read(path, entry, cells.kind)
                os.utime(entry)
                self._report("codes_taken", path=str(path))
            except (ValueError, OSError) as error:
                self._report("codes_made_anew", path=str(path), reason=str(error))
            else:
                return codes
        codes = cells.coded(vectors(), seed=seed)
        if not self._writes:
            return codes
        try:
            _write(codes, path, entry)
            self._drop_others()
            return _read(path, entry, cells.kind)  # its pages are shared, and need no swap
        except (ValueError, OSError) as error:  # a full disk costs the next start its time, nothing else
            self._report("codes_not_kept", path=str(path), reason=str(error))
            return codes

    def _drop_others(self) -> None:
        """Leave the codes of the `KEPT` sets of items that were used last."""
        used: dict[str, float] = {}
        for entry in self._root.glob("codes-*.json"):
            of = entry.name.split("-")[1]
            used[of] = max(used.get(of, 0.0), entry.stat().st_mtime)
        for of in sorted(used, key=lambda of: (of != self._of, -used[of]))[KEPT:]:
            for entry in self._root.glob(f"codes-{of}-*.json"):
                entry.unlink(missing_ok=True)
                entry.with_suffix(".safetensors").unlink(missing_ok=True)


def _write(codes: Any, path: Path, entry: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing-{os.getpid()}")
    held = {one.name: getattr(codes, one.name) for one in fields(codes)}
    arrays: dict[str, npt.NDArray[Any]] = {name: one for name, one in held.items() if isinstance(one, np.ndarray)}
    arrays["sizes"] = np.array([one for one in held.values() if isinstance(one, int)], dtype=np.int64)
    try:
        written = write_tensors(aside, {name: SlicedTensor.whole(array) for name, array in arrays.items()})
        entry.unlink(missing_ok=True)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sealed = entry.with_name(f".{entry.name}.writing-{os.getpid()}")
    sealed.write_text(json.dumps(asdict(written)), encoding="utf-8")
    sealed.replace(entry)


def _read(path: Path, entry: Path, kind: type[Codes]) -> Codes:
    """Mapped. Raises: BundleError, or another ValueError, for what is not what was written."""
    try:
        said = FileEntry(**json.loads(entry.read_text(encoding="utf-8")))
    except (TypeError, RecursionError) as error:
        raise BundleError(f"{entry}: {error}") from error
    check_file(path.parent, path.name, said, verify=True)
    arrays: dict[str, Any] = read_tensors(path)
    parts = fields(kind)  # type: ignore[arg-type]
    sizes = zip((one.name for one in parts if one.type is int), arrays.pop("sizes").tolist(), strict=True)
    return kind(**dict.fromkeys((one.name for one in parts), None) | dict(sizes) | arrays)
