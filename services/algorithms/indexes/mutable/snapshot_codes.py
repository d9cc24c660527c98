"""Stored codes of a snapshot's first rows, so that a start need not compute them.

codes.safetensors   num_rows, and one array <key>:<field> per key and field of its codes

With ten million items at preset `quick`, computing codes takes 76 s on two cores; checking and mapping them takes 1 s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.quantized_scan import Codes, Coding, RowCodes, codes_key
from services.algorithms.ops.quantized_scan.cells import FloatMatrix

CODES = "codes.safetensors"

Arrays = Mapping[str, npt.NDArray[Any]]


def code_arrays(codes: Mapping[str, RowCodes], num_rows: int) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {"num_rows": np.array([num_rows])}
    for key, one in codes.items():
        for part in fields(one):  # type: ignore[arg-type]
            value = getattr(one, part.name)
            if value is not None:
                arrays[f"{key}:{part.name}"] = np.array([value]) if isinstance(value, int) else value
    return arrays


@dataclass(kw_only=True, slots=True)
class HeldCodes:
    """The stored codes of a snapshot's first `num_rows` rows. A call computes codes if the stored ones are missing,
    malformed or of another method, size or width.

    made: whether a call computed codes. report: called with an event, `path`, `part` and, after a rejection, `reason`.
    """

    path: Path | None = None
    arrays: Arrays = field(default_factory=dict)
    made: bool = False
    report: Callable[..., object] = lambda event, **said: None

    @property
    def num_rows(self) -> int:
        return int(self.arrays["num_rows"][0]) if self.arrays else 0

    def __call__(
        self,
        part: str,
        vectors: Callable[[], FloatMatrix],
        shape: tuple[int, int],
        /,
        *,
        cells: Coding[Codes],
        seed: int,
    ) -> Codes:
        """Codes of `part`, stored or computed from its vectors."""
        try:
            codes = self._codes_of(part, codes_key(part, cells, seed), cells.kind)
            if codes is not None:
                codes.check_fits(*shape)
                self.report("codes_taken", path=str(self.path), part=part)
                return codes
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            self.report("codes_refused", path=str(self.path), part=part, reason=str(error))
        self.made = True
        return cells.coded(vectors(), seed=seed)

    def _codes_of(self, part: str, key: str, kind: type[Codes]) -> Codes | None:
        """Raise ValueError for codes of another method; malformed arrays raise any error that `__call__` catches."""
        found = {
            name.rpartition(":")[2]: array for name, array in self.arrays.items() if name.rpartition(":")[0] == key
        }
        if found:
            values = {
                one.name: int(found[one.name][0]) if one.type is int else found.get(one.name)
                for one in fields(kind)  # type: ignore[arg-type]
            }
            return kind(**values)
        others = {known for name in self.arrays if (known := name.rpartition(":")[0]).startswith(f"{part}, ")}
        if others:
            raise ValueError(f"codes of {', '.join(sorted(others))}; allowed: {key}")
        return None
