"""A catalogue in the bound pass's format: components and gates in int8, with bounds of their rounding errors.

Numbers in a proof are rounded outward. Residual norms are computed in float64, from codes and scales as stored.

Letters: X items, P component pairs, d component width, L lanes. Memory per item: P_x * d + L + 12 bytes, padded (332 at
8 x 8 x 32, besides 1,280 of float32 states), and d for its average.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.mol_scores import MolScorer

VECTOR = 16
# Limit for int32 sums of d products of bytes.
MAX_WIDTH = 65_536


_LARGEST = 1e30


def bounded(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Limit values to float32's range. A value at the limit proves nothing."""
    return np.asarray(np.clip(values, -_LARGEST, _LARGEST))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """The layout of P_q x P_x pairs of width d."""

    num_query_components: int
    num_item_components: int
    width: int

    def __post_init__(self) -> None:
        if self.width > MAX_WIDTH:
            raise ValueError(f"component width is {self.width}; the bound pass allows at most {MAX_WIDTH}")

    @property
    def num_pairs(self) -> int:
        return self.num_query_components * self.num_item_components

    @property
    def padded_components(self) -> int:
        count = self.num_item_components
        return 1 << (count - 1).bit_length() if count <= VECTOR else -(-count // VECTOR) * VECTOR

    @property
    def count(self) -> int:
        """The number of lanes, L."""
        return -(-self.num_query_components * self.padded_components // VECTOR) * VECTOR

    @property
    def quads(self) -> int:
        """Groups of four codes per component."""
        return -(-self.width // 4)

    @property
    def of_pair(self) -> npt.NDArray[np.int64]:
        """Each pair's lane: (P,), read-only."""
        return _lane_of_pair(self)

    def spread(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Copy values per pair (..., P) to float32 values per lane (..., L), zero in the padding."""
        out = np.zeros((*values.shape[:-1], self.count), dtype=np.float32)
        out[..., self.of_pair] = bounded(values)
        return out


@lru_cache(maxsize=16)
def _lane_of_pair(lanes: Lanes) -> npt.NDArray[np.int64]:
    query, item = np.divmod(np.arange(lanes.num_pairs), lanes.num_item_components)
    found = query * lanes.padded_components + item
    found.flags.writeable = False
    return found


LEVELS = 127
_UP = 1 + 2.0**-20  # far more than the few roundings between a residual and its stored norm
_CHUNK = 1024  # items at a time, a multiple of VECTOR; temporary arrays fit in the cache


class BoundItems:
    """Codes of X items.

    Arrays: codes (X, d4, PX, 4) uint8 with 128 for zero, scales (X,), component_errors (X,) = max over p_x of ||g -
    g~||, item_errors (X,) = sqrt(sum over p_x of ||g - g~||^2); gates (X, L) int8 with gate_scales (P,) and gate_errors
    (P,) = max |x - x~|; gate_reach (P,) = max |x|.
    """

    def __init__(self, scorer: MolScorer, *, with_gates: bool) -> None:
        """Code the items of `scorer`. Raises: ValueError for components wider than 65,536."""
        self.lanes = Lanes(
            num_query_components=scorer.num_query_components,
            num_item_components=scorer.num_item_components,
            width=scorer.width,
        )
        self.num_items = scorer.num_items
        self.largest_norm = float(scorer.magnitudes.norms.max(initial=0.0)) * _UP
        self.largest_item_norm = float(np.linalg.norm(scorer.magnitudes.norms)) * _UP
        self._code_components(scorer)
        self.gates: npt.NDArray[np.int8] | None = None
        self.gate_scales = self.gate_errors = self.gate_reach = np.zeros(self.lanes.num_pairs)
        if with_gates and scorer.shape.gated and self.lanes.num_pairs > 1:
            self._code_gates(scorer)

    @property
    def nbytes(self) -> int:
        arrays = (self.codes, self.scales, self.component_errors, self.item_errors, self.gates)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def _code_components(self, scorer: MolScorer) -> None:
        lanes = self.lanes
        padded_width = 4 * lanes.quads
        self.codes = np.full((self.num_items, lanes.quads, lanes.padded_components, 4), 128, dtype=np.uint8)
        quads = self.codes.view(np.uint32)[..., 0]
        self.scales = np.empty(self.num_items, dtype=np.float32)
        self.component_errors = np.empty(self.num_items, dtype=np.float32)
        self.item_errors = np.empty(self.num_items, dtype=np.float32)
        for start, components in _chunks(scorer.components):
            rows = slice(start, start + len(components))
            reach = np.abs(components).max(axis=(1, 2))
            scales = np.maximum(np.where(reach > 0, reach / np.float32(LEVELS), 1), 1e-30).astype(np.float32)
            codes = np.rint(components / scales[:, None, None])
            np.clip(codes, -LEVELS, LEVELS, out=codes)
            residuals = codes.astype(np.float64)
            residuals *= -scales.astype(np.float64)[:, None, None]
            residuals += components
            squares = np.einsum("xpd,xpd->xp", residuals, residuals)
            self.scales[rows] = scales
            self.component_errors[rows] = np.sqrt(squares.max(axis=1)) * _UP
            self.item_errors[rows] = np.sqrt(squares.sum(axis=1)) * _UP
            codes += 128
            padded = np.full((*codes.shape[:2], padded_width), 128, dtype=np.uint8)
            padded[:, :, : lanes.width] = codes
            # Four codes are copied as one number.
            quads[rows, :, : lanes.num_item_components] = padded.view(np.uint32).swapaxes(1, 2)

    def _code_gates(self, scorer: MolScorer) -> None:
        item_gate, reach = scorer.item_gate, scorer.magnitudes.gate
        assert item_gate is not None
        assert reach is not None
        self.gate_reach = reach
        self.gate_scales = np.where(self.gate_reach > 0, self.gate_reach / LEVELS, 1.0)
        self.gate_errors = self.gate_scales * (0.5 * _UP)
        self.gates = np.zeros((self.num_items, self.lanes.count), dtype=np.int8)
        for start in range(0, self.num_items, _CHUNK):
            codes = np.rint(item_gate[start : start + _CHUNK] / self.gate_scales)
            self.gates[start : start + len(codes), self.lanes.of_pair] = codes.astype(np.int8)


class AverageItems:
    """Items' mean components in int8, in blocks of sixteen, for a rough ranking without a certificate.

    Array: codes (ceil(X / 16), d4, 16, 4) uint8 with 128 for zero. All have one scale, because only the order matters.
    """

    def __init__(self, scorer: MolScorer) -> None:
        self.num_items, self.width = scorer.num_items, scorer.width
        self.quads = -(-scorer.width // 4)
        blocks = -(-scorer.num_items // VECTOR)
        # Means are computed twice in chunks, because the means of all items would need much memory.
        means = ((start, components.mean(axis=1)) for start, components in _chunks(scorer.components))
        reach = max((np.abs(part).max() for _, part in means), default=np.float32(0))
        scale = np.float32(reach / LEVELS or 1)
        self.codes = np.empty((blocks, self.quads, VECTOR, 4), dtype=np.uint8)
        quads = self.codes.view(np.uint32)[..., 0]
        for start, components in _chunks(scorer.components):
            padded = np.full((-(-len(components) // VECTOR) * VECTOR, 4 * self.quads), 128, dtype=np.uint8)
            padded[: len(components), : self.width] = np.rint(components.mean(axis=1) / scale) + 128
            coded = padded.view(np.uint32).reshape(-1, VECTOR, self.quads).swapaxes(1, 2)
            quads[start // VECTOR : start // VECTOR + len(coded)] = coded

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes)


def _chunks(array: npt.NDArray[np.float32]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK]
