"""Mixture-of-Logits scores on a GPU. One pass keeps the P cosines and G hidden values of a query and item in registers.

A program takes `M` items and loops over queries. Tensor cores compute the cosines, then both layers of the pair gate,
whose left operands are the accumulators of the previous product; SiLU, softmax and the weighted mean follow. The
program writes an upper bound on the exact score of each query and item, and the lower bounds that a threshold needs.
Operands are float16 or bfloat16, sums float32 (`kernel_error.py` bounds the error; decision 010).

Letters: B queries, X items, n scored items per query (X, or a pool's size), P_q, P_x query and item components, d
component width, G gate hidden width. In this file a pair is p_x * Q + p_q, and P_q, P_x, d, G are rounded up to powers
of two (Q at least 8, P, d, G at least 16), by zero rows and columns that the softmax omits.
"""

# Triton kernels have no Python type annotations.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _silu_of_double(half, FAST: tl.constexpr):
    """SiLU(x) for half = x / 2: half + half * tanh(half), one special-function instruction, not two."""
    if FAST:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, is_pure=True, pack=1)
        return half + half * tanh
    else:
        return 2.0 * half / (1.0 + tl.exp(tl.minimum(-2.0 * half, 80.0)))


@triton.jit
def _dot(left, right, total, FAST: tl.constexpr):
    """left @ right + total in float32. The else branch exists because Triton's interpreter multiplies bfloat16's
    bits.
    """
    if FAST:
        return tl.dot(left, right, total)
    else:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")


# For a number that is 1 or divisible by 16, Triton would compile again, in 1 to 3 s. For these numbers this gains
# nothing.
_ANY_NUMBER = [
    "allowed_stride", "num_scored", "first_item", "upper_stride", "lower_stride", "num_queries", "queries_per_program"
]  # fmt: skip


@triton.jit(do_not_specialize=_ANY_NUMBER)
def mol_scores_kernel(
    items,  # (X, P_x, d) half precision
    item_gate,  # (X, P) half precision
    components,  # (B, P_q, d) half precision
    query_gate,  # (B, P) float32, halved
    hidden_weight,  # (P, G) half precision, halved
    hidden_bias,  # (G,) float32, halved
    out_weight,  # (G, P) half precision, halved
    out_bias,  # (P,) float32, halved
    cosines,  # (B, n, P) float32 where PRECOMPUTED
    rows,  # (B, n) int64 where GATHERED; -1 is no item
    allowed,  # (1 or B, X) uint8 where MASKED
    allowed_stride,  # 0 where one mask serves all queries
    errors,  # (B, 3) float32: base, constant, per_cosine of kernel_error
    upper,  # (B, n) float32
    lower,  # (B, n), or (B, tiles) where GROUPED: the largest of each tile
    num_scored,  # n
    first_item,  # first item of this chunk of the catalogue, and its column in `upper`
    upper_stride,
    lower_stride,
    num_queries,
    queries_per_program,
    width,
    P_q: tl.constexpr,
    P_x: tl.constexpr,
    Q: tl.constexpr,
    PX: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    HAS_PAIR_GATE: tl.constexpr,
    HAS_STATE_GATES: tl.constexpr,
    PRECOMPUTED: tl.constexpr,
    GATHERED: tl.constexpr,
    MASKED: tl.constexpr,
    GROUPED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Bounds on the scores of M items for some queries. Grid: (tiles of n, groups of queries)."""
    P: tl.constexpr = Q * PX
    dtype = hidden_weight.dtype.element_ty
    tile = tl.program_id(0)
    place = tile * M + tl.arange(0, M)
    real = place < num_scored
    pair = tl.arange(0, P)
    width_range = tl.arange(0, D)
    query_component = tl.arange(0, Q)
    # Item m's component p_x is row p_x * M + m, so the accumulator's row blocks become column blocks without a copy.
    tile_row = tl.arange(0, PX * M)
    tile_component = tile_row // M
    if HAS_PAIR_GATE:
        hidden_pair = tl.arange(0, G)
        w1 = tl.load(hidden_weight + pair[:, None] * G + hidden_pair[None, :])
        b1 = tl.load(hidden_bias + hidden_pair)
        w2 = tl.load(out_weight + hidden_pair[:, None] * P + pair[None, :])
        b2 = tl.load(out_bias + pair)
    if not GATHERED:
        item = (first_item + place).to(tl.int64)
        if HAS_STATE_GATES:
            x_gate = tl.load(item_gate + item[:, None] * P + pair[None, :], mask=real[:, None], other=0.0)
        if not PRECOMPUTED:
            tile_place = tile * M + tile_row % M
            row_offset = ((first_item + tile_place).to(tl.int64) * P_x + tile_component) * width
            tile_mask = (tile_place < num_scored) & (tile_component < P_x)
            g = tl.load(
                items + row_offset[:, None] + width_range[None, :],
                mask=tile_mask[:, None] & (width_range < width)[None, :],
                other=0.0,
            )
    first = tl.program_id(1).to(tl.int64) * queries_per_program
    for step in range(0, tl.minimum(queries_per_program, num_queries - first)):
        query = first + step
        if GATHERED:
            item = tl.load(rows + query * num_scored + place, mask=real, other=-1)
            present = item >= 0
            item = tl.maximum(item, 0)
            if HAS_STATE_GATES:
                x_gate = tl.load(item_gate + item[:, None] * P + pair[None, :], mask=present[:, None], other=0.0)
        else:
            present = real
        if PRECOMPUTED:
            c = tl.load(
                cosines + (query * num_scored + place[:, None]) * P + pair[None, :], mask=real[:, None], other=0.0
            )
        else:
            if GATHERED:
                tile_place = tile * M + tile_row % M
                tile_item = tl.load(rows + query * num_scored + tile_place, mask=tile_place < num_scored, other=-1)
                row_offset = (tl.maximum(tile_item, 0) * P_x + tile_component) * width
                tile_mask = (tile_item >= 0) & (tile_component < P_x)
                g = tl.load(
                    items + row_offset[:, None] + width_range[None, :],
                    mask=tile_mask[:, None] & (width_range < width)[None, :],
                    other=0.0,
                )
            f = tl.load(
                components + (query * P_q + query_component[None, :]) * width + width_range[:, None],
                mask=(query_component < P_q)[None, :] & (width_range < width)[:, None],
                other=0.0,
            )
            c = _dot(g, f, tl.zeros((PX * M, Q), dtype=tl.float32), FAST)
            c = tl.reshape(tl.permute(tl.reshape(c, (PX, M, Q)), (1, 0, 2)), (M, P))
        term = errors + query * 3
        gate_error = tl.load(term + 1) + tl.load(term + 2) * tl.sqrt(tl.sum(c * c, axis=1))
        half_gate = tl.zeros((M, P), dtype=tl.float32)
        if HAS_PAIR_GATE:
            # Each cosine is split into two half-precision numbers: rounding it to one would cause most of the error,
            # and tensor cores are not the bottleneck.
            high = c.to(dtype)
            low = (c - high.to(tl.float32)).to(dtype)
            hidden = _dot(low, w1, tl.zeros((M, G), dtype=tl.float32), FAST)
            hidden = _dot(high, w1, hidden, FAST) + b1[None, :]
            half_gate = _dot(_silu_of_double(hidden, FAST).to(dtype), w2, half_gate, FAST) + b2[None, :]
        if HAS_STATE_GATES:
            half_gate += tl.load(query_gate + query * P + pair)[None, :] * x_gate.to(tl.float32)
        logit = _silu_of_double(half_gate, FAST)
        logit *= 1.4426950408889634
        if P_q * P_x < P:
            counts = (pair // Q < P_x) & (pair % Q < P_q)
            logit = tl.where(counts[None, :], logit, float("-inf"))
        weight = tl.exp2(logit - tl.max(logit, axis=1)[:, None])
        total = tl.sum(weight, axis=1)
        score = tl.sum(weight * c, axis=1) / total
        square = tl.sum(weight * c * c, axis=1) / total
        # square - score^2 nearly cancels if the cosines agree, so a bound on its rounding error is added.
        spread = tl.sqrt(tl.maximum(square - score * score, 0.0) + (2 * P + 16) * 2.4e-7 * square)
        gate_error = tl.minimum(gate_error, 60.0)  # larger bounds are useless, but must not be infinite
        error = tl.load(term) + gate_error * tl.exp(gate_error) * spread
        if MASKED:
            present = present & (tl.load(allowed + query * allowed_stride + item, mask=present, other=0) != 0)
        above = tl.where(present, score + error, float("-inf"))
        below = tl.where(present, score - error, float("-inf"))
        tl.store(upper + query * upper_stride + first_item + place, above, mask=real)
        if GROUPED:
            tl.store(lower + query * lower_stride + first_item // M + tile, tl.max(below, axis=0))
        else:
            tl.store(lower + query * lower_stride + first_item + place, below, mask=real)


@triton.jit(do_not_specialize=["num_scored", "first_item", "num_queries"])
def cosines_kernel(
    items,  # (X, P_x, d) half precision
    components,  # (B, P_q, d) half precision
    rows,  # (B, n) int64 where GATHERED
    cosines,  # (B, n, P) float32
    num_scored,
    first_item,
    num_queries,
    width,
    P_q: tl.constexpr,
    P_x: tl.constexpr,
    Q: tl.constexpr,
    PX: tl.constexpr,
    QUERIES: tl.constexpr,  # per program; 1 where GATHERED
    ITEMS: tl.constexpr,
    STEP: tl.constexpr,
    GATHERED: tl.constexpr,
    FAST: tl.constexpr,
):
    """All cosines of a bounded chunk of items, for components too wide for a tile of `mol_scores_kernel`.

    Grid: (tiles of n, groups of queries).
    """
    tile_row = tl.arange(0, ITEMS * PX)
    place = tl.program_id(0) * ITEMS + tile_row // PX
    component = tile_row % PX
    column = tl.arange(0, QUERIES * Q)
    query = (tl.program_id(1) * QUERIES + column // Q).to(tl.int64)
    query_component = column % Q
    if GATHERED:
        item = tl.load(rows + tl.program_id(1).to(tl.int64) * num_scored + place, mask=place < num_scored, other=-1)
    else:
        item = tl.where(place < num_scored, (first_item + place).to(tl.int64), -1)
    row_mask = (item >= 0) & (component < P_x)
    column_mask = (query < num_queries) & (query_component < P_q)
    row_offset = (tl.maximum(item, 0) * P_x + component) * width
    column_offset = (query * P_q + query_component) * width
    step = tl.arange(0, STEP)
    total = tl.zeros((ITEMS * PX, QUERIES * Q), dtype=tl.float32)
    for start in range(0, width, STEP):
        inside = start + step < width
        g = tl.load(items + row_offset[:, None] + start + step[None, :], row_mask[:, None] & inside[None, :], other=0.0)
        f = tl.load(
            components + column_offset[None, :] + start + step[:, None],
            column_mask[None, :] & inside[:, None],
            other=0.0,
        )
        total = _dot(g, f, total, FAST)
    pair = component[:, None] * Q + query_component[None, :]
    target = (query[None, :] * num_scored + place[:, None]) * (Q * PX) + pair
    tl.store(cosines + target, total, mask=(place < num_scored)[:, None] & (query < num_queries)[None, :])
