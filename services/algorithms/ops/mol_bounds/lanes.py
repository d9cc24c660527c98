"""Where each query-item pair sits in the vectors of the bound pass.

One lane is one pair p = p_q * P_x + p_x. P_x is padded to a power of two (a multiple of 16 beyond that), so that an
item's components repeat over a vector, and the whole to L, a multiple of 16. Padding lanes hold zeros and never count.

Letters: P_q, P_x query and item components, P = P_q * P_x, d component width, L lanes.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

VECTOR = 16
# Beyond this an int32 could not hold the sum of d products of bytes.
MAX_WIDTH = 65_536


_LARGEST = 1e30


def bounded(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Values cut to what float32 can hold; whoever meets one that large takes it as proving nothing."""
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
        """L."""
        return -(-self.num_query_components * self.padded_components // VECTOR) * VECTOR

    @property
    def quads(self) -> int:
        """Groups of four values that a component's codes come in."""
        return -(-self.width // 4)

    @property
    def of_pair(self) -> npt.NDArray[np.int64]:
        """The lane of each pair: (P,), not to be written to."""
        return _lane_of_pair(self)

    def spread(self, values: npt.NDArray[np.floating], *, fill: float = 0.0) -> npt.NDArray[np.float32]:
        """Values per pair (..., P) as float32 values per lane (..., L), `fill` in the padding."""
        out = np.full((*values.shape[:-1], self.count), fill, dtype=np.float32)
        out[..., self.of_pair] = bounded(values)
        return out


@lru_cache(maxsize=16)
def _lane_of_pair(lanes: Lanes) -> npt.NDArray[np.int64]:
    query, item = np.divmod(np.arange(lanes.num_pairs), lanes.num_item_components)
    found = query * lanes.padded_components + item
    found.flags.writeable = False
    return found
