"""Launch the kernels of `kernel.py`: round shapes, order pairs, and choose chunks and grid.

At import, Triton decides whether kernels are compiled or interpreted, so only a scorer on a card, and the kernels'
tests, import this.

Letters: B queries, X items, n scored items per query, P_q, P_x query and item components, P = P_q * P_x, d component
width, G gate hidden width. Kernel order: pair p_x * Q + p_q, all rounded up to powers of two.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton

from services.algorithms.ops.mol_scores.kernel import cosines_kernel, mol_scores_kernel
from services.algorithms.scoring.states import PairGate

TILE = 64  # items of one program: the rows of one warpgroup's matrix instruction
_WARPS = 4
# A larger item tile does not fit next to the weights in shared memory (227 KB on H100/H200, for two programs per
# multiprocessor). Then `cosines_kernel` computes cosines.
_TILE_BYTES = 72 << 10
_ENOUGH_PROGRAMS = 1024  # 132 multiprocessors, two programs at a time, four waves


def _power_of_two(size: int, least: int) -> int:
    return max(least, int(triton.next_power_of_2(size)))


def _fast(tensor: torch.Tensor) -> bool:
    """Whether NVIDIA's instructions exist. The interpreter and other cards lack them."""
    return tensor.device.type == "cuda" and torch.version.hip is None


@dataclass(frozen=True, kw_only=True, slots=True)
class PairShape:
    """P_q, P_x, d and G, as given and rounded up. G is 0 without a pair gate."""

    query_components: int
    item_components: int
    width: int
    hidden: int

    @property
    def q(self) -> int:
        return _power_of_two(self.query_components, 8)

    @property
    def px(self) -> int:
        return _power_of_two(self.item_components, max(1, 16 // self.q))

    @property
    def pairs(self) -> int:
        """Columns of the kernel's gates and pair weights."""
        return self.q * self.px

    @property
    def d(self) -> int:
        return _power_of_two(self.width, 16)

    @property
    def g(self) -> int:
        return _power_of_two(self.hidden, 16)

    @property
    def constants(self) -> dict[str, int]:
        return {"P_q": self.query_components, "P_x": self.item_components, "Q": self.q, "PX": self.px}

    @property
    def precomputed(self) -> bool:
        """Whether an item tile exceeds shared memory, so that cosines come from a bounded chunk in memory."""
        return TILE * self.px * self.d * 2 > _TILE_BYTES


class FusedItems:
    """A catalogue in half precision and the pair gate, as the kernels need them."""

    def __init__(
        self,
        components: torch.Tensor,
        gate: torch.Tensor | None,
        pair_gate: PairGate | None,
        *,
        query_components: int,
        chunk_bytes: int = 64 << 20,
    ) -> None:
        """Take components (X, P_x, d) in half precision and gate (X, P), pair p_q * P_x + p_x, on one device.

        chunk_bytes: limit of the cosines of components too wide for one tile.
        """
        self.components = components
        self._shape = PairShape(
            query_components=query_components,
            item_components=components.shape[1],
            width=components.shape[2],
            hidden=0 if pair_gate is None else len(pair_gate.hidden_bias),
        )
        self._chunk_bytes = chunk_bytes
        dtype, device = components.dtype, components.device
        self._gate = None if gate is None else self._in_kernel_order(gate.to(dtype))
        self._weights: tuple[torch.Tensor, ...] | None = None
        if pair_gate is not None:
            # Weights are halved, exactly, because the kernel's SiLU takes x / 2.
            spare = self._shape.g - self._shape.hidden
            hidden = self._in_kernel_order(0.5 * torch.from_numpy(np.array(pair_gate.hidden_weight)))
            out = self._in_kernel_order(0.5 * torch.from_numpy(np.array(pair_gate.out_weight)).T.contiguous())
            hidden_bias = 0.5 * torch.from_numpy(np.array(pair_gate.hidden_bias))
            out_bias = self._in_kernel_order(0.5 * torch.from_numpy(np.array(pair_gate.out_bias)))
            pad = torch.nn.functional.pad
            self._weights = (
                pad(hidden, (0, 0, 0, spare)).T.contiguous().to(device, dtype),
                pad(hidden_bias, (0, spare)).to(device),
                pad(out, (0, 0, 0, spare)).to(device, dtype),
                out_bias.to(device),
            )

    @property
    def nbytes(self) -> int:
        return 0 if self._gate is None else self._gate.numel() * self._gate.element_size()

    def query_gate(self, gate: torch.Tensor) -> torch.Tensor:
        return self._in_kernel_order(0.5 * gate)

    def _in_kernel_order(self, values: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        pairs = values.reshape(*values.shape[:-1], shape.query_components, shape.item_components).transpose(-1, -2)
        out = values.new_zeros((*values.shape[:-1], shape.px, shape.q))
        out[..., : shape.item_components, : shape.query_components] = pairs
        return out.flatten(-2)

    def bounds(
        self,
        components: torch.Tensor,
        query_gate: torch.Tensor,
        errors: torch.Tensor,
        *,
        rows: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
        grouped: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Upper and lower bounds on s of every item, or of `rows` (B, n) with -1 for no item: (B, n) float32 each.

        Shapes: components (B, P_q, d) in half precision, query_gate from `query_gate`, errors (B, 3) from
        `KernelErrorModel`, allowed (1 or B, X) uint8. -inf where no item is allowed. grouped: return the largest lower
        bound of every `TILE` items, (B, ceil(n / TILE)).
        """
        # The kernels need contiguous rows.
        components, rows = components.contiguous(), None if rows is None else rows.contiguous()
        allowed = None if allowed is None else allowed.contiguous()
        num_queries = len(components)
        count = len(self.components) if rows is None else rows.shape[1]
        lower_width = triton.cdiv(count, TILE) if grouped else count
        upper = components.new_empty((num_queries, count), dtype=torch.float32)
        lower = components.new_empty((num_queries, lower_width), dtype=torch.float32)
        if not num_queries or not count:
            return upper, lower
        step = count
        if self._shape.precomputed:
            step = max(TILE, self._chunk_bytes // (4 * num_queries * self._shape.pairs) // TILE * TILE)
        for first in range(0, count, step):
            size = min(step, count - first)
            some = rows if rows is None or step >= count else rows[:, first : first + size].contiguous()
            cosines = self._cosines(components, first, size, some) if self._shape.precomputed else None
            chunk = (cosines, some, allowed)
            self._launch(components, query_gate, errors, (upper, lower), first, size, chunk, grouped=grouped)
        return upper, lower

    def _launch(
        self,
        components: torch.Tensor,
        query_gate: torch.Tensor,
        errors: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
        first: int,
        size: int,
        chunk: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        *,
        grouped: bool,
    ) -> None:
        """Score `size` items or rows into the bounds `out`, from column `first` on. chunk: cosines, rows and masks, if
        any.
        """
        shape, num_queries = self._shape, len(components)
        unused = out[0]  # a pointer that the compiled variant never reads
        weights = self._weights or (self.components, unused, self.components, unused)
        cosines, rows, allowed = chunk
        optional = [unused if tensor is None else tensor for tensor in (self._gate, *chunk)]
        tiles = triton.cdiv(size, TILE)
        # Many queries per program keep the item tile in shared memory; few keep every multiprocessor busy.
        per_program = 1 if rows is not None else max(1, min(num_queries, num_queries * tiles // _ENOUGH_PROGRAMS))
        mol_scores_kernel[(tiles, triton.cdiv(num_queries, per_program))](
            self.components,
            optional[0],
            components,
            query_gate,
            *weights,
            *optional[1:],
            0 if allowed is None or len(allowed) == 1 else len(self.components),
            errors,
            *out,
            size,
            first,
            out[0].shape[1],
            out[1].shape[1],
            num_queries,
            per_program,
            shape.width,
            **shape.constants,
            D=shape.d,
            G=shape.g,
            M=TILE,
            HAS_PAIR_GATE=self._weights is not None,
            HAS_STATE_GATES=self._gate is not None,
            PRECOMPUTED=cosines is not None,
            GATHERED=rows is not None,
            MASKED=allowed is not None,
            GROUPED=grouped,
            FAST=_fast(components),
            num_warps=_WARPS,
            num_stages=1 if rows is not None else 3,
            enable_fp_fusion=True,
        )

    def _cosines(self, components: torch.Tensor, first: int, size: int, rows: torch.Tensor | None) -> torch.Tensor:
        """Cosines of all queries with items first..first + size - 1, or with `rows`: (B, size, P) float32."""
        shape, num_queries = self._shape, len(components)
        out = components.new_empty((num_queries, size, shape.pairs), dtype=torch.float32)
        together = 1 if rows is not None else min(max(1, 64 // shape.q), _power_of_two(num_queries, 1))
        items_per_program = max(1, 128 // shape.px)
        cosines_kernel[(triton.cdiv(size, items_per_program), triton.cdiv(num_queries, together))](
            self.components,
            components,
            out if rows is None else rows,
            out,
            size,
            first,
            num_queries,
            shape.width,
            **shape.constants,
            QUERIES=together,
            ITEMS=items_per_program,
            STEP=64,
            GATHERED=rows is not None,
            FAST=_fast(components),
            num_warps=_WARPS,
            num_stages=3,
            enable_fp_fusion=True,
        )
        return out
