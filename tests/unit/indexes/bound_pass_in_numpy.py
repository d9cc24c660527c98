"""The bound pass in NumPy: the same mathematics as cpu.cpp, which is compared with it.

It materialises (b, x, P) for a tile of queries and items.

Letters: B queries, X items, P_q, P_x components, P = P_q * P_x, d component width, L lanes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.ops.mol_bounds import BoundPass, Survivors
from services.algorithms.ops.mol_bounds.int8_network import Int8Network
from services.algorithms.ops.mol_bounds.items import BoundItems
from services.algorithms.ops.mol_bounds.tables import TURN, QueryTables
from services.algorithms.scoring.states import QueryStates

Floats = npt.NDArray[Any]  # float32, or float64 in tests
FloatArray = npt.NDArray[np.float32]


def survivors_in_numpy(
    bound: BoundPass,
    queries: QueryStates,
    thresholds: npt.NDArray[np.float64],
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Survivors:
    """As `BoundPass.survivors`."""
    tables = bound.tables(queries, thresholds)
    kept, tested = [], np.zeros(len(queries), dtype=np.int64)
    for query in range(len(queries)):
        rows = np.arange(bound.items.num_items)
        if allowed is not None:
            rows = rows[allowed if allowed.ndim == 1 else allowed[query]]
        # What overflows compares as nothing with 0: such an item is kept.
        with np.errstate(over="ignore", invalid="ignore"):
            found, tested[query] = cannot_be_dropped(
                bound.items, bound.network, tables, query, rows, by_gates=bound.by_gates
            )
        kept.append(found)
    return Survivors(rows=kept, tested=tested)


def exp_silu(values: Floats) -> Floats:
    """The unnormalised weight of a gate, W(g) = exp(SiLU(g)): falls until `TURN`, rises after it."""
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(values / (1 + np.exp(-values))))


def interval_weights(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """The least and largest W over [low, high]."""
    turn = np.full_like(low, TURN)
    return exp_silu(np.maximum(np.minimum(turn, high), low)), np.maximum(exp_silu(low), exp_silu(high))


def gate_intervals(
    tables: QueryTables, query: int, gates: FloatArray | None, count: int
) -> tuple[FloatArray, FloatArray]:
    """Ends of the gates of n items without a network, (n, L) each."""
    middle = np.zeros((count, tables.width.shape[1]), dtype=np.float32)
    if gates is not None:
        middle = middle + tables.gate[query] * gates
    return middle - tables.width[query], middle + tables.width[query]


def network_gate_intervals(
    tables: QueryTables,
    network: Int8Network,
    query: int,
    cosines: FloatArray,
    gates: FloatArray | None,
    norm_error: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """As `gate_intervals`, with the network in int8, from cosines (n, L) whose vectors are off by norm_error (n,)."""

    def product(codes: FloatArray, weights: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
        # (n, 4 quads) x (quads, m, 4) -> (n, m); float64 holds the integers exactly.
        matrix = weights.swapaxes(0, 1).reshape(weights.shape[1], -1).astype(np.float64)
        return np.asarray(codes.astype(np.float64) @ matrix.T)

    slack, function_error = float(tables.scalars[query, 5]), float(tables.scalars[query, 7])
    step = np.float32(tables.cosine_scales[query])
    codes = np.clip(np.floor(cosines / step + np.float32(128.5)), 1, 255)
    integers = product(codes, network.hidden) + network.hidden_corrections
    hidden = integers.astype(np.float32) * (network.hidden_scales * step) + network.hidden_bias
    segments = np.clip(hidden * 2 + 16, 0, 31).astype(np.int64)
    active = network.segment_values[segments] + network.segment_slopes[segments] * hidden
    active_step = (np.maximum(active.max(axis=1, keepdims=True), 0) - np.float32(network.zero)) / np.float32(254)
    integers = product(np.floor((active - np.float32(network.zero)) / active_step + np.float32(0.5)), network.out)
    middle = integers.astype(np.float32) * (network.out_scales * active_step)
    middle = middle + network.out_offsets + np.float32(TURN)
    if gates is not None:
        middle = middle + tables.gate[query] * gates
    width = tables.width[query] + norm_error[:, None] * network.steepness
    width = width + (np.linalg.norm(cosines, axis=1) * (1 + slack))[:, None] * network.hidden_rounding
    width = width + (np.linalg.norm(active, axis=1) * (1 + slack))[:, None] * network.out_rounding
    width = width + (active_step * 0.501 + function_error) * network.out_sums
    return middle - width, middle + width


def cannot_be_dropped(
    items: BoundItems,
    network: Int8Network | None,
    tables: QueryTables,
    query: int,
    rows: npt.NDArray[np.int64],
    *,
    by_gates: bool,
) -> tuple[npt.NDArray[np.int64], int]:
    """Of some rows (n,) those that may reach the threshold, and how many came as far as the gate intervals."""
    scalars = tables.scalars[query]
    lanes = items.lanes
    pairs = np.array(lanes.of_pair)
    norm_error = np.full(len(rows), scalars[3], dtype=np.float32)
    spread = np.zeros((len(rows), lanes.count), dtype=np.float32)
    norm_error += np.float32(scalars[4]) * items.item_errors[rows]
    errors = np.float32(scalars[1]) + np.float32(scalars[2]) * items.component_errors[rows]
    threshold = np.float32(scalars[0]) - errors
    # (n, PX, 4 d4) and, one lane each, (L, 4 d4). Float64 holds the integers exactly at any width.
    # No -1: there may be no rows.
    width = int(np.prod(items.codes.shape[1:])) // lanes.padded_components
    codes = items.codes[rows].swapaxes(1, 2).reshape(len(rows), lanes.padded_components, width).astype(np.float64)
    codes -= 128
    query_codes = tables.codes[query].swapaxes(0, 1).reshape(lanes.count, -1).astype(np.float64)
    item_of_pair = np.arange(lanes.num_pairs) % lanes.num_item_components
    for component in range(lanes.num_item_components):
        mine = pairs[item_of_pair == component]
        spread[:, mine] = codes[:, component] @ query_codes[mine].T
    spread *= tables.scales[query] * items.scales[rows][:, None]
    keep = ~(spread[:, pairs].max(axis=1) < threshold)
    tested = 0
    if by_gates:
        rows, spread, threshold, norm_error = rows[keep], spread[keep], threshold[keep], norm_error[keep]
        tested = len(rows)
        gates = None if items.gates is None else items.gates[rows].astype(np.float32)
        if network is None:
            low, high = gate_intervals(tables, query, gates, len(rows))
        else:
            low, high = network_gate_intervals(tables, network, query, spread, gates, norm_error)
        lightest, heaviest = interval_weights(low[:, pairs], high[:, pairs])
        above = spread[:, pairs] - threshold[:, None]
        terms = np.where(above > 0, heaviest, lightest) * above
        keep = ~(terms.sum(axis=-1) + float(scalars[6]) * np.abs(terms).sum(axis=-1) < 0)
    return rows[keep], tested
