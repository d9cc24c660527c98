"""The bound pass in plain PyTorch: the same mathematics as cpu.cpp, for tests and where no kernel was built.

It materialises (b, x, P) for a tile of queries and items.

Letters: B queries, X items, P_q, P_x components, P = P_q * P_x, d component width, L lanes.
"""

import numpy as np
import numpy.typing as npt
import torch

from services.algorithms.ops.mol_bounds.int8_network import Int8Network
from services.algorithms.ops.mol_bounds.items import BoundItems
from services.algorithms.ops.mol_bounds.tables import TURN, QueryTables


def exp_silu(values: torch.Tensor) -> torch.Tensor:
    """The unnormalised weight of a gate, W(g) = exp(SiLU(g)): falls until `TURN`, rises after it."""
    return torch.exp(torch.nn.functional.silu(values))


def interval_weights(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest W over [low, high]."""
    turn = torch.full_like(low, TURN)
    return exp_silu(torch.maximum(torch.minimum(turn, high), low)), torch.maximum(exp_silu(low), exp_silu(high))


def excess(cosines: torch.Tensor, low: torch.Tensor, high: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """max over gates in [low, high] (.., P) of sum_p w_p (c_p - S): below 0 iff no gate in there gives s >= S."""
    lightest, heaviest = interval_weights(low, high)
    above = cosines - threshold
    return (torch.where(above > 0, heaviest, lightest) * above).sum(dim=-1)


def upper_bounds(cosines: torch.Tensor, low: torch.Tensor, high: torch.Tensor, *, steps: int = 6) -> torch.Tensor:
    """The largest s = sum w c / sum w over gates in [low, high]: (.., P) -> (..), never below it.

    Dinkelbach: the corner chosen by U gives the next U, rising to the maximum; the last step adds what weak duality
    says can still be missing, excess(U) / (sum of lightest weights).
    """
    lightest, heaviest = interval_weights(low, high)
    bound = cosines.amin(dim=-1, keepdim=True)
    for _ in range(steps):
        weights = torch.where(cosines > bound, heaviest, lightest)
        bound = (weights * cosines).sum(dim=-1, keepdim=True) / weights.sum(dim=-1, keepdim=True)
    missing = excess(cosines, low, high, bound).clamp_min(0) / lightest.sum(dim=-1)
    return bound[..., 0] + missing


def gate_intervals(
    tables: QueryTables, query: int, cosines: torch.Tensor, gates: torch.Tensor | None, norm_error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of the gates of n items, (n, L) each, from cosines (n, L) whose vectors are off by norm_error (n,)."""

    def row(values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values[query])

    slack = float(tables.scalars[query, 5])
    away = cosines - row(tables.centre)
    along = [(away * row(direction)).sum(dim=-1) for direction in (tables.direction_1, tables.direction_2)]
    square = (away * away).sum(dim=-1)
    across = ((square - along[0] ** 2 - along[1] ** 2).clamp_min(0) + slack * square).sqrt()
    radius = square.sqrt() * (1 + slack) + norm_error
    middle = (
        row(tables.middle) + TURN + along[0][:, None] * row(tables.slope_1) + along[1][:, None] * row(tables.slope_2)
    )
    if gates is not None:
        middle = middle + row(tables.gate) * gates
    width = row(tables.width) + row(tables.steepness) * (norm_error + slack * radius)[:, None]
    width = width + row(tables.curvature) * radius.square()[:, None] + row(tables.rest) * across[:, None]
    return middle - width, middle + width


def int8_gate_intervals(
    tables: QueryTables,
    network: Int8Network,
    query: int,
    cosines: torch.Tensor,
    gates: torch.Tensor | None,
    norm_error: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gate_intervals`, with the network run in int8."""

    def row(values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values[query])

    def product(codes: torch.Tensor, weights: npt.NDArray[np.int8]) -> torch.Tensor:
        # (n, 4 quads) x (quads, m, 4) -> (n, m); float64 holds the integers exactly.
        matrix = torch.from_numpy(weights).transpose(0, 1).flatten(1).double()
        return codes.double() @ matrix.T

    slack, function_error = float(tables.scalars[query, 5]), float(tables.scalars[query, 7])
    step = float(tables.cosine_scales[query])
    codes = torch.floor(cosines / step + 128.5).clamp(1, 255)
    integers = product(codes, network.hidden) + torch.from_numpy(network.hidden_corrections)
    hidden = integers.float() * (torch.from_numpy(network.hidden_scales) * step) + torch.from_numpy(network.hidden_bias)
    segments = (hidden * 2 + 16).clamp(0, 31).long()
    values, slopes = torch.from_numpy(network.segment_values), torch.from_numpy(network.segment_slopes)
    active = values[segments] + slopes[segments] * hidden
    active_step = (active.amax(dim=1, keepdim=True).clamp_min(0) - network.zero) / 254
    integers = product(torch.floor((active - network.zero) / active_step + 0.5), network.out)
    middle = integers.float() * (torch.from_numpy(network.out_scales) * active_step)
    middle = middle + torch.from_numpy(network.out_offsets) + TURN
    if gates is not None:
        middle = middle + row(tables.gate) * gates

    def carried(amount: torch.Tensor, factor: npt.NDArray[np.float32]) -> torch.Tensor:
        return amount[:, None] * torch.from_numpy(factor)

    width = row(tables.width) + carried(norm_error, network.steepness)
    width = width + carried(cosines.norm(dim=1) * (1 + slack), network.hidden_rounding)
    width = width + carried(active.norm(dim=1) * (1 + slack), network.out_rounding)
    width = width + carried(active_step[:, 0] * 0.501 + function_error, network.out_sums)
    return middle - width, middle + width


def cannot_be_dropped(
    items: BoundItems,
    network: Int8Network | None,
    tables: QueryTables,
    query: int,
    rows: npt.NDArray[np.int64],
    cosines: torch.Tensor | None,
    *,
    by_gates: bool,
) -> tuple[npt.NDArray[np.int64], int]:
    """Of some rows (n,) those that may reach the threshold, and how many came as far as the gate intervals.

    `cosines` (P_q, n, P_x) in float32, or None to take the codes'.
    """
    scalars = tables.scalars[query]
    lanes = items.lanes
    pairs = torch.tensor(lanes.of_pair)
    norm_error = torch.full((len(rows),), float(scalars[3]))
    threshold = torch.full((len(rows),), float(scalars[0] - scalars[1]))
    spread = torch.zeros(len(rows), lanes.count)
    if cosines is not None:
        spread[:, pairs] = cosines.transpose(0, 1).reshape(len(rows), -1)
    else:
        assert items.codes is not None
        norm_error += float(scalars[4]) * torch.from_numpy(items.item_errors[rows])
        errors = float(scalars[1]) + float(scalars[2]) * torch.from_numpy(items.component_errors[rows])
        threshold = float(scalars[0]) - errors
        # (n, PX, 4 d4) and, one lane each, (L, 4 d4). Float64 holds the integers exactly at any width.
        codes = torch.from_numpy(items.codes[rows]).transpose(1, 2).flatten(2).double() - 128
        query_codes = torch.from_numpy(tables.codes[query]).transpose(0, 1).flatten(1).double()
        item_of_pair = torch.arange(lanes.num_pairs) % lanes.num_item_components
        for component in range(lanes.num_item_components):
            mine = pairs[item_of_pair == component]
            spread[:, mine] = (codes[:, component] @ query_codes[mine].T).float()
        spread *= torch.from_numpy(tables.scales[query]) * torch.from_numpy(items.scales[rows])[:, None]
    keep = ~(spread[:, pairs].amax(dim=1) < threshold)
    tested = 0
    if by_gates:
        rows, spread, threshold, norm_error = rows[keep.numpy()], spread[keep], threshold[keep], norm_error[keep]
        tested = len(rows)
        gates = None if items.gates is None else torch.from_numpy(items.gates[rows]).float()
        if network is None:
            low, high = gate_intervals(tables, query, spread, gates, norm_error)
        else:
            low, high = int8_gate_intervals(tables, network, query, spread, gates, norm_error)
        lightest, heaviest = interval_weights(low[:, pairs], high[:, pairs])
        above = spread[:, pairs] - threshold[:, None]
        terms = torch.where(above > 0, heaviest, lightest) * above
        keep = ~(terms.sum(dim=-1) + float(scalars[6]) * terms.abs().sum(dim=-1) < 0)
    return rows[keep.numpy()], tested
