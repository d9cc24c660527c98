"""What a search of coded cells answers, in NumPy and float64: the definition that `cpu.cpp` is tested against.

Letters: B queries, X items, C cells, d width, h coded width, K results, N pool size.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.quantized_scan import CellAnswer, CellScan
from services.algorithms.ops.quantized_scan.cells import LANES, CellCodes, FloatMatrix

_UNIT = 2.0**-24
_CELLS_AT_ONCE = 16


class ScanInNumpy(CellScan):
    def __init__(self, codes: CellCodes, vectors: FloatMatrix) -> None:
        super().__init__(codes, vectors=vectors)
        self._vectors = vectors

    def _search(
        self,
        queries: FloatMatrix,
        allowed: npt.NDArray[np.bool_] | None,
        tolerances: npt.NDArray[np.float64] | None,
        **how: Any,
    ) -> CellAnswer:
        k, pool = (min(how[name], self.num_items) for name in ("k", "pool"))
        visit, prove, rescore = (how[name] for name in ("visit", "prove", "rescore"))
        answer = CellAnswer(
            rows=np.full((len(queries), k), -1),
            scores=np.full((len(queries), k), -np.inf),
            bounds=np.empty(len(queries)),
            touched=np.zeros((len(queries), 2), dtype=np.int64),
        )
        tolerances = np.zeros(len(queries)) if tolerances is None else tolerances
        codes, vectors = self.codes, self._vectors
        integers = codes.integers().astype(np.float32)  # sums stay below 2^24, where float32 is exact
        largest_centre = np.linalg.norm(codes.centres, axis=1).max()
        spread = 1.0 if codes.projection is None else codes.coded_width**0.5
        for number, query in enumerate(queries):
            norm = float(np.linalg.norm(query.astype(np.float64)))
            coded = query if codes.projection is None else query @ codes.projection
            unit = float(np.abs(coded).max(initial=0)) / 127 or 1.0
            query_codes = np.clip(np.rint(coded / np.float32(unit)), -127, 127).astype(np.float32)
            code_error = float(np.linalg.norm(coded - query_codes * unit))
            rounding = (codes.width + 16) * _UNIT * norm * (largest_centre + spread * float(codes.code_norms.max()))
            bases = codes.centres @ query
            slacks = norm * codes.errors + code_error * codes.code_norms + rounding if prove else np.zeros(len(bases))
            keys = bases + norm * codes.radii if prove else bases + visit.reach * norm * codes.spreads
            mask = allowed if allowed is None or allowed.ndim == 1 else allowed[number]
            num_allowed = self.num_items if mask is None else np.count_nonzero(mask)
            wanted = min(k if prove else pool, num_allowed)
            found_rows = np.empty(0, dtype=np.int64)
            found, slack = np.empty(0), np.empty(0)
            threshold = -np.inf
            visited = np.zeros(codes.num_cells, dtype=bool)
            scanned = 0
            order = np.argsort(-keys, kind="stable")
            start = 0
            while start < len(order) and wanted:
                full = len(found) >= wanted
                most = _CELLS_AT_ONCE
                if not prove:
                    most = min(most, max(visit.probes - start, 0 if full else 1))
                cells = order[start : start + most]
                start += most
                if full:
                    hopeless = keys[cells] + (rounding if prove else 0) < threshold
                    cells = cells[~hopeless] if prove or visit.reach > 0 else cells
                if not len(cells):
                    break
                visited[cells] = True
                slots = np.concatenate([np.arange(codes.starts[c] * LANES, codes.starts[c + 1] * LANES) for c in cells])
                scanned += int(codes.counts[cells].sum())
                owner = np.repeat(cells, LANES * (codes.starts[cells + 1] - codes.starts[cells]))
                keep = codes.rows[slots] >= 0
                if mask is not None:
                    keep &= mask[codes.rows[slots]]
                slots, owner = slots[keep], owner[keep]
                products = (integers[slots] @ query_codes) * unit * codes.scales[owner] + bases[owner]
                found_rows = np.concatenate([found_rows, codes.rows[slots]])
                found, slack = np.concatenate([found, products]), np.concatenate([slack, slacks[owner]])
                if len(found) >= wanted:
                    lows = found - slack
                    threshold = np.partition(lows, len(lows) - wanted)[len(lows) - wanted]
                    keep = found + slack >= threshold
                    found_rows, found, slack = found_rows[keep], found[keep], slack[keep]
            answer.touched[number] = scanned, len(found) if rescore else 0
            scores = found
            if rescore:
                scores = vectors[found_rows].astype(np.float64) @ query.astype(np.float64)
            rows, scores = _ordered(found_rows, scores, float(tolerances[number]) if rescore else 0.0)
            size = min(k if rescore else pool, len(rows))
            answer.rows[number, :size], answer.scores[number, :size] = rows[:size], scores[:size]
            if len(found) == num_allowed and (rescore or size == len(found)):
                answer.bounds[number] = -np.inf
                continue
            worst = threshold if rescore or not size else scores[size - 1]
            error = norm * codes.errors.max() + code_error * codes.code_norms.max() + rounding
            beyond = (bases + norm * codes.radii + rounding)[~visited]
            answer.bounds[number] = max(worst + error, beyond.max(initial=-np.inf))
        return answer


def _ordered(
    rows: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], tolerance: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Best first; scores that a chain of steps of at most `tolerance` connects count as equal, and go by row."""
    order = np.lexsort((rows, -scores))
    rows, scores = rows[order], scores[order]
    if tolerance > 0 and len(rows) > 1:
        starts = np.concatenate([[True], scores[:-1] - scores[1:] > tolerance])
        group = np.cumsum(starts) - 1
        order = np.lexsort((rows, group))
        return rows[order], scores[starts][group]
    return rows, scores
