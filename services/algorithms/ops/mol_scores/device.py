"""Mixture-of-Logits scores on a torch device: one fast pass bounds every score; float64 orders the candidates.

On a CUDA card `kernel.py` computes the bounds in half precision, see `kernel_error.py`. Elsewhere, and for values
beyond half precision, they come from the plain formula in float32, in chunks, see `rounding.py`. `bounds` and
`scores_float64` do not wait for the device or copy from it, so CUDA graphs can capture them.

Letters: B queries, X items, n scored items per query, K results, P_q query components, P pairs, d component width, G
gate hidden width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.ops.grouped_top_k.device import at_least
from services.algorithms.ops.mol_scores import rounding
from services.algorithms.ops.mol_scores.kernel_error import LARGEST, KernelErrorModel, StoredItems
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate, QueryStates, shape_of

if TYPE_CHECKING:
    from services.algorithms.ops.mol_scores.fused import FusedItems

Precision = Literal["float16", "bfloat16"]
_STATS_ITEMS = 65_536
_GROUP, _GROUPS_PER_RESULT = 64, 4  # one lower bound per 64 items suffices with at least 4 K groups


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceQueries:
    """B queries on the device, with their scores' errors.

    Shapes: components (B, P_q, d) and gate (B, P) float32, pair p_q * P_x + p_x; half (B, P_q, d) and half_gate (B, P
    as the kernel rounds it) in the kernel's format; errors (B, 3): the terms of `KernelError`, or, for the plain pass,
    the bound on |score - exact| in the first column; double_error (B,) float64: the bound for float64 scores.
    half_fits: whether first stages may use half precision. fused: whether the kernel scores.
    """

    components: torch.Tensor
    gate: torch.Tensor | None
    half: torch.Tensor
    half_gate: torch.Tensor
    errors: torch.Tensor
    double_error: torch.Tensor
    half_fits: bool
    fused: bool

    def __len__(self) -> int:
        return len(self.components)

    def tensors(self) -> list[torch.Tensor]:
        found = [self.components, self.gate, self.half, self.half_gate, self.errors, self.double_error]
        return [tensor for tensor in found if tensor is not None]


class DeviceScorer:
    """Item states on a torch device, in float32 and, for the kernel, also in half precision."""

    def __init__(
        self,
        items: ItemStates,
        pair_gate: PairGate | None,
        *,
        device: torch.device,
        precision: Precision = "float16",
        kernels: bool | None = None,
        chunk_bytes: int = 64 << 20,
    ) -> None:
        """Copy X items. precision: format of the kernel's operands; bounds include its error. kernels: whether to run
        kernels, by default on a CUDA card. chunk_bytes: limit of each intermediate tensor of the plain passes, and of
        the kernel for wide components.

        float16 has an eighth of bfloat16's error at the same speed, but values above 30,000 need the plain pass.
        Raises: ValueError for no items, or if gates and components disagree.
        """
        if precision not in LARGEST:
            raise ValueError(f"precision={precision!r}; allowed: float16, bfloat16")
        self.shape = shape_of(items, pair_gate)
        self.num_pairs, self.num_query_components = self.shape.num_pairs, self.shape.num_query_components
        self.num_items, self.num_item_components, self.width = (int(size) for size in items.components.shape)
        if not self.num_items:
            raise ValueError("the index is empty: num_items=0 allowed: at least 1")
        self.pair_gate, self.device, self.precision = pair_gate, device, precision
        self._chunk_bytes = chunk_bytes
        self.kernels = device.type == "cuda" if kernels is None else kernels
        self.components = torch.from_numpy(np.array(items.components)).to(device)
        self.gate = None if items.gate is None else torch.from_numpy(np.array(items.gate)).to(device)
        self.magnitudes, self.gate_range, stored = _statistics(items, _half(precision))
        self._weights = None if pair_gate is None else gate_weights(pair_gate, device, torch.float32)
        self._weights_float64 = None if pair_gate is None else gate_weights(pair_gate, device, torch.float64)
        self._error = KernelErrorModel(stored, pair_gate, precision=precision)
        # First stages also use half precision.
        self.half: torch.Tensor | None = None
        if self.kernels and float(self.magnitudes.norms.max()) <= LARGEST[precision]:
            self.half = self.components.to(_half(precision))
        self._fused: FusedItems | None = None
        if self.half is not None and self.num_pairs > 1:
            # Triton is required only where kernels run.
            from services.algorithms.ops.mol_scores import fused as launcher

            self._fused = launcher.FusedItems(
                self.half, self.gate, pair_gate, query_components=self.num_query_components, chunk_bytes=chunk_bytes
            )

    @property
    def nbytes(self) -> int:
        total = sum(_nbytes(tensor) for tensor in (self.components, self.gate, self.half) if tensor is not None)
        return total + (0 if self._fused is None else self._fused.nbytes)

    def check(self, queries: QueryStates) -> None:
        """Raise ValueError as `ItemShape.check_queries` does."""
        self.shape.check_queries(queries)

    def prepare(self, queries: QueryStates) -> DeviceQueries:
        """Copy B queries to the device and bound the errors of their scores. Raises: as `check`."""
        self.check(queries)
        components = torch.from_numpy(np.array(queries.components))
        gate = None
        if self.shape.gated and queries.gate is not None:
            gate = torch.from_numpy(np.array(queries.gate))
        half = components.to(_half(self.precision))
        double_error = self.error_bounds_float64(queries)
        # The error of float64 is added to keep items whose float64 scores cannot be distinguished from the K-th.
        base = rounding.error_bounds(queries, self.magnitudes, self.pair_gate, unit=rounding.FLOAT32) + double_error
        errors = np.zeros((len(queries), 3), dtype=np.float32)
        errors[:, 0] = np.nextafter((base * (1 + 2**-22)).astype(np.float32), np.float32(np.inf))
        half_fits = self.half is not None and bool(torch.isfinite(half).all())
        fused = self._fused is not None and half_fits
        if fused:
            found = self._error.bounds(queries, half.float().numpy(), also=double_error)
            fused = bool((found.largest_half <= LARGEST[self.precision]).all() and np.isfinite(found.terms).all())
            errors = found.terms if fused else errors
        half_gate = torch.zeros((len(queries), 1))
        if gate is not None and self._fused is not None:
            half_gate = self._fused.query_gate(gate)

        def to_device(values: npt.NDArray[np.floating]) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device)

        return DeviceQueries(
            components=components.to(self.device),
            gate=None if gate is None else gate.to(self.device),
            half=half.to(self.device),
            half_gate=half_gate.to(self.device),
            errors=to_device(errors),
            double_error=to_device(double_error),
            half_fits=half_fits,
            fused=fused,
        )

    def cosine_errors(self, queries: QueryStates, prepared: DeviceQueries) -> npt.NDArray[np.float64]:
        """Error bounds (B, P) of a first stage's cosines with any item."""
        if prepared.half_fits:
            return self._error.cosine_errors(queries, prepared.half.float().cpu().numpy())
        return rounding.cosine_errors(queries, self.magnitudes)

    def error_bounds_float64(self, queries: QueryStates) -> npt.NDArray[np.float64]:
        """See `MolScorer.error_bounds_float64`."""
        return rounding.error_bounds(queries, self.magnitudes, self.pair_gate, unit=rounding.FLOAT64)

    def bounds(
        self,
        queries: DeviceQueries,
        *,
        rows: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
        grouped: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Upper and lower bounds on s of every item, or of `rows` (B, n), -1 for none: (B, n) float32 each.

        -inf without an allowed item; allowed: (1 or B, X) uint8. grouped: allow one lower bound per group of items, its
        largest; the K-th largest of these is at most the K-th largest of all.
        """
        if queries.fused:
            assert self._fused is not None
            return self._fused.bounds(
                queries.half,
                queries.half_gate,
                queries.errors,
                rows=rows,
                allowed=allowed,
                grouped=grouped,
            )
        scores = self._plain(queries, rows, self._weights, torch.float32)
        if allowed is not None:
            present = allowed.bool() if rows is None else _taken(allowed.bool(), rows)
            scores = torch.where(present, scores, -torch.inf)
        error = queries.errors[:, :1]
        return scores + error, scores - error

    def scores_float64(self, queries: DeviceQueries, rows: torch.Tensor) -> torch.Tensor:
        """s of `rows` (B, n) in float64 over the stored float32 states: (B, n), -inf for row -1."""
        return self._plain(queries, rows, self._weights_float64, torch.float64)

    def _plain(
        self,
        queries: DeviceQueries,
        rows: torch.Tensor | None,
        weights: tuple[torch.Tensor, ...] | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        count = self.num_items if rows is None else rows.shape[1]
        out = torch.empty((len(queries), count), dtype=dtype, device=self.device)
        hidden = 0 if self.pair_gate is None else len(self.pair_gate.hidden_bias)
        widest = max(hidden, 2 * self.num_pairs, self.num_item_components * self.width) * dtype.itemsize
        step = max(1, self._chunk_bytes // (widest * max(1, len(queries))))
        query_components = queries.components.to(dtype)
        query_gate = None if queries.gate is None else queries.gate.to(dtype)[:, None, :]
        for start in range(0, count if len(queries) else 0, step):
            if rows is None:
                item_components = self.components[None, start : start + step]
                item_gate = None if self.gate is None else self.gate[None, start : start + step]
            else:
                some = rows[:, start : start + step].clamp_min(0)
                item_components = self.components[some]
                item_gate = None if self.gate is None or query_gate is None else self.gate[some]
            cosines = torch.einsum(
                "bqd,bxpd->bxqp",
                query_components,
                item_components.to(dtype).expand(len(queries), -1, -1, -1),
            ).flatten(2)
            out[:, start : start + step] = mixture(cosines, query_gate, item_gate, weights)
        if rows is not None:
            out.masked_fill_(rows < 0, -torch.inf)
        return out


def mixture(
    cosines: torch.Tensor,
    query_gate: torch.Tensor | None,
    item_gate: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...] | None,
) -> torch.Tensor:
    """s (b, n), in the cosines' dtype, from cosines (b, n, P), gates (b, 1, P) and (b or 1, n, P), and the pair
    gate.
    """
    if cosines.shape[-1] == 1:
        return cosines[..., 0]
    silu = torch.nn.functional.silu
    gate = torch.zeros_like(cosines)
    if weights is not None:
        w1, b1, w2, b2 = weights
        gate = torch.matmul(silu(torch.matmul(cosines, w1) + b1), w2) + b2
    if query_gate is not None and item_gate is not None:
        gate = gate + query_gate * item_gate.to(gate.dtype)
    return (torch.softmax(silu(gate), dim=-1) * cosines).sum(dim=-1)


def gate_weights(pair_gate: PairGate, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """W1 transposed (P, G), b1, W2 transposed (G, P), b2."""
    arrays = (pair_gate.hidden_weight.T, pair_gate.hidden_bias, pair_gate.out_weight.T, pair_gate.out_bias)
    return tuple(torch.from_numpy(np.array(array)).to(device, dtype) for array in arrays)


def _half(precision: Precision) -> torch.dtype:
    return torch.float16 if precision == "float16" else torch.bfloat16


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _taken(allowed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return allowed.expand(len(rows), -1).gather(1, rows.clamp_min(0)) & (rows >= 0)


def _statistics(
    items: ItemStates, dtype: torch.dtype
) -> tuple[rounding.ItemMagnitudes, tuple[FloatArray, FloatArray] | None, StoredItems]:
    num_components = items.components.shape[1]
    norms, residuals = np.zeros(num_components), np.zeros(num_components)
    for start in range(0, len(items), _STATS_ITEMS):
        exact = torch.from_numpy(np.array(items.components[start : start + _STATS_ITEMS]))
        stored = exact.to(dtype).double()
        norms = np.maximum(norms, torch.linalg.vector_norm(exact.double(), dim=-1).amax(dim=0).numpy())
        residual = torch.linalg.vector_norm(exact.double() - stored, dim=-1).amax(dim=0).numpy()
        residuals = np.maximum(residuals, residual)
    gates, gate_residuals, gate_range = None, None, None
    if items.gate is not None:
        gates, gate_residuals = np.zeros(items.gate.shape[1]), np.zeros(items.gate.shape[1])
        for start in range(0, len(items), _STATS_ITEMS):
            exact = torch.from_numpy(np.array(items.gate[start : start + _STATS_ITEMS]))
            gates = np.maximum(gates, exact.double().abs().amax(dim=0).numpy())
            apart = (exact.double() - exact.to(dtype).double()).abs().amax(dim=0).numpy()
            gate_residuals = np.maximum(gate_residuals, apart)
        gate_range = items.gate.min(axis=0), items.gate.max(axis=0)
    width = items.components.shape[2]
    stored_items = StoredItems(
        width=width, norms=norms, residuals=residuals, gates=gates, gate_residuals=gate_residuals
    )
    return rounding.ItemMagnitudes(norms=norms, gate=gates, width=width), gate_range, stored_items


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAnswer:
    """The exact top K of B pools, on the device.

    Shapes: rows (B, K') int64 and scores (B, K') float64, padded with -1 and -inf; kth_scores (B,): a lower bound of
    the K-th exact score, -inf if a pool had fewer items; evaluated (B,): number of items to evaluate in float64, above
    `capacity` if the answer is invalid.
    """

    rows: torch.Tensor
    scores: torch.Tensor
    kth_scores: torch.Tensor
    evaluated: torch.Tensor


def exact_answer(
    scorer: DeviceScorer,
    queries: DeviceQueries,
    pool: torch.Tensor | None,
    allowed: torch.Tensor | None,
    *,
    k: int,
    capacity: int,
) -> DeviceAnswer:
    """The top `k` of each query's pool (B, n) of distinct rows, padded with -1, or of all items. allowed (1 or B, X):
    uint8.

    The threshold is the K-th largest lower bound, because K items score at least as much. Items whose upper bound
    reaches it are evaluated in float64; equal scores are ordered by row. CUDA graphs can capture this function, since
    nothing waits for the device. So `capacity` limits the evaluated items in advance; if it was too low, the caller
    repeats the call.
    """
    count = scorer.num_items if pool is None else pool.shape[1]
    grouped = pool is None and queries.fused and count // _GROUP >= _GROUPS_PER_RESULT * k
    upper, lower = scorer.bounds(queries, rows=pool, allowed=allowed, grouped=grouped)
    if lower.shape[1] < k:
        thresholds = torch.full((len(lower),), -torch.inf, device=lower.device)
    else:
        thresholds = torch.topk(lower, k, dim=1, sorted=False).values.amin(dim=1)
    columns, evaluated = at_least(upper, thresholds, capacity, fused=scorer.kernels)
    rows = columns if pool is None else torch.where(columns >= 0, pool.gather(1, columns.clamp_min(0)), -1)
    scores = scorer.scores_float64(queries, rows)
    ordered_rows, ordered, raw = _in_order(rows, scores, scorer.num_items, 2 * queries.double_error)
    wanted = min(k, scorer.num_items)
    kth_scores = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=rows.device)
    if k <= capacity:
        kth_scores = raw[:, k - 1] - queries.double_error
    return DeviceAnswer(
        rows=ordered_rows[:, :wanted], scores=ordered[:, :wanted], kth_scores=kth_scores, evaluated=evaluated
    )


def _in_order(
    rows: torch.Tensor, scores: torch.Tensor, num_items: int, tolerance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and scores (B, n) by (-score, row), and the sorted raw scores; see `order_by_score_then_id`."""
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    raw, rows = scores.gather(1, order), rows.gather(1, order)
    new_group = torch.ones_like(rows, dtype=torch.bool)
    # -inf minus -inf is NaN and starts no new group.
    new_group[:, 1:] = raw[:, :-1] - raw[:, 1:] > tolerance[:, None]
    columns = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    starts = torch.cummax(torch.where(new_group, columns, 0), dim=1).values
    group = new_group.cumsum(dim=1)
    order = torch.argsort(group * (num_items + 1) + torch.where(rows >= 0, rows, num_items), dim=1)
    return rows.gather(1, order), raw.gather(1, starts), raw
