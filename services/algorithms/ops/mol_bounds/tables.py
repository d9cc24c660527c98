"""Each query's numbers for the bound pass: one row of lanes per quantity, rounded outward.

For a pair with cosine c~ and gate code x~:

    c <= c~ + cosine error
    |q x - gate x~| <= width

`int8_network.py` bounds m(c), the gate network's part. The slack covers every float32 rounding of the pass (counted in
decision 006).

Letters: B queries, P_q query components, P pairs, d component width, L lanes.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from services.algorithms.native import aligned_zeros
from services.algorithms.ops.mol_bounds.int8_network import Int8Network
from services.algorithms.ops.mol_bounds.items import LEVELS, BoundItems, bounded
from services.algorithms.scoring.states import QueryStates

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

UNIT = 2.0**-24
WEIGHT_ERROR = 0.0045  # relative error of exp(SiLU) from a table with steps of 1 / 128: e^(1.0999 / 256) - 1 = 0.0043
TURN = -1.2784645  # where SiLU is smallest
_UP = 1 + 2.0**-20


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryTables:
    """Arrays (B, L) unless noted: codes (B, d4, L, 4) int8, corrections int32, scalars (B, 8) as in cpu.cpp.

    Arrays with a value per lane begin on a cache line, because loads across lines took a quarter of the time.
    largest (B,): the largest magnitude among a query's float32 numbers, NaN if one is NaN.
    """

    codes: npt.NDArray[np.int8]
    corrections: npt.NDArray[np.int32]
    scales: Floats
    outside: Floats
    inside: Floats
    width: Floats
    gate: Floats
    scalars: Floats
    cosine_scales: Floats  # (B,): one step of a cosine's code in the int8 network
    largest: Floats


# In the order of cpu.cpp.
ARRAYS = tuple(field.name for field in fields(QueryTables) if field.name != "largest")
_PER_LANE = tuple(name for name in ARRAYS if name not in ("codes", "corrections", "scalars", "cosine_scales"))


def query_tables(
    queries: QueryStates,
    items: BoundItems,
    network: Int8Network | None,
    thresholds: Doubles,
) -> QueryTables:
    lanes = items.lanes
    num_queries, _, width = queries.components.shape
    components = queries.components.astype(np.float64)
    norms = np.linalg.norm(components, axis=-1)
    codes, scales, residuals = _coded(queries.components)
    lane_of_pair = lanes.of_pair
    query_of_pair = np.arange(lanes.num_pairs) // lanes.num_item_components
    per_lane = aligned_zeros((num_queries, lanes.quads, lanes.count, 4), np.int8)
    padded = np.zeros((num_queries, lanes.num_query_components, 4 * lanes.quads), dtype=np.int8)
    padded[:, :, :width] = codes
    quads = padded.reshape(num_queries, lanes.num_query_components, lanes.quads, 4).transpose(0, 2, 1, 3)
    per_lane[:, :, lane_of_pair] = quads[:, :, query_of_pair]
    corrections = aligned_zeros((num_queries, lanes.count), np.int32)
    corrections[:, lane_of_pair] = -128 * codes.sum(axis=2, dtype=np.int32)[:, query_of_pair]

    gates = np.zeros((num_queries, lanes.num_pairs))
    if items.gates is not None and queries.gate is not None:
        gates = queries.gate.astype(np.float64)
    largest = norms.max(axis=1, initial=0.0)
    magnitude = largest * items.largest_norm
    all_norms = np.sqrt((norms**2).sum(axis=1))
    # One relative slack covers all sums, which have at most `terms` numbers.
    terms = lanes.num_pairs + 64
    slack = 2 * terms * UNIT
    scalars = np.zeros((num_queries, 8))
    coded_norm = items.largest_item_norm + float(items.item_errors.max(initial=0))
    code_norms = norms + residuals
    cosine_error = residuals.max(axis=1, initial=0.0) * (items.largest_norm + items.component_errors.max(initial=0))
    cosine_error = cosine_error + 8 * UNIT * code_norms.max(axis=1, initial=0.0) * 2 * items.largest_norm
    scalars[:, 2] = largest * _UP
    scalars[:, 3] = np.sqrt((residuals**2).sum(axis=1)) * coded_norm
    scalars[:, 3] += 8 * UNIT * np.sqrt((code_norms**2).sum(axis=1)) * coded_norm
    # The spectral norm from P_q x P_q products takes a tenth of the time of singular values.
    squares = np.linalg.eigvalsh(components @ components.transpose(0, 2, 1))[:, -1]
    scalars[:, 4] = np.sqrt(squares.clip(min=0)) * _UP
    rounding = 8 * UNIT * (magnitude + np.abs(thresholds))
    scalars[:, 0] = np.nextafter(thresholds.astype(np.float32), np.float32(-np.inf))
    scalars[:, 1] = (cosine_error + rounding) * _UP
    scalars[:, 3] += 8 * UNIT * np.sqrt(lanes.num_pairs) * 2 * magnitude
    scalars[:, 3] *= _UP
    scalars[:, 5] = slack
    scalars[:, 6] = WEIGHT_ERROR + slack
    widths = np.abs(gates) * items.gate_errors
    widths += 16 * UNIT * (np.abs(gates) * items.gate_reach + 4) + 1e-9
    cosine_reach = np.maximum(largest + residuals.max(axis=1, initial=0.0), 1e-20) * coded_norm
    cosine_scales = np.maximum(cosine_reach * _UP / LEVELS, 1e-20)
    if network is not None:
        # Each cosine is coded again before the network.
        scalars[:, 3] += 0.501 * cosine_scales * np.sqrt(lanes.num_pairs)
        scalars[:, 7] = network.function_error(2 * all_norms * items.largest_item_norm)
    up = 1 + slack
    per_pair = {
        "scales": scales[:, query_of_pair],
        "inside": np.ones_like(gates),
        "width": widths * up,
        "gate": gates * items.gate_scales,
    }
    block = aligned_zeros((len(_PER_LANE), num_queries, lanes.count), np.float32)
    in_lanes = dict(zip(_PER_LANE, block, strict=True))
    for name, values in per_pair.items():
        in_lanes[name][:, lane_of_pair] = bounded(values)
    numbers = bounded(scalars).astype(np.float32)
    steps = bounded(cosine_scales).astype(np.float32)
    largest_numbers = np.maximum.reduce((np.abs(block).max(axis=(0, 2)), np.abs(numbers).max(axis=1), steps))
    in_lanes["outside"][...] = np.where(in_lanes["inside"] > 0, np.float32(0), np.float32(-np.inf))
    return QueryTables(
        codes=per_lane,
        corrections=corrections,
        scalars=numbers,
        cosine_scales=steps,
        largest=largest_numbers,
        **in_lanes,
    )


def _coded(components: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], Doubles, Doubles]:
    """Codes (B, P_q, d), scales (B, P_q) as float32 values, and norms (B, P_q) of the codes' residuals."""
    reach = np.abs(components).max(axis=-1, initial=0.0)
    scales = np.where(reach > 0, np.maximum(reach / LEVELS, 1e-30), 1.0).astype(np.float32).astype(np.float64)
    codes = np.clip(np.rint(components / scales[..., None]), -LEVELS, LEVELS)
    residuals = np.linalg.norm(components - codes * scales[..., None], axis=-1) * _UP
    return codes.astype(np.int8), scales, residuals
