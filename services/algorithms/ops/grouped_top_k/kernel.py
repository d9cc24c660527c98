"""Grouped top-N on a GPU. Dot products are computed twice, never stored.

`tile_maxima_kernel` stores only the best of every tile of W items per (query vector, component). The (N + 1)-th largest
maximum is the threshold: at least N + 1 items reach it. Few more items reach it if there are at least 4 N tiles.
`collect_kernel` computes the products again, which is cheaper than writing and reading them, and stores those that
reach the threshold. `collect_values_kernel` collects from given values. The order of results depends on the run;
callers sort.

Letters: R query vectors (B queries times Q each), X items, S item components, d width, W items per maximum.
"""

# Triton kernels have no Python type annotations.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _tile_scores(
    items,
    queries,
    allowed,
    allowed_stride,
    item,
    row,
    group,
    num_items,
    num_rows,
    num_groups,
    rows_per_query,
    width,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """A tile's dot products (ROWS, ITEMS), -inf for items that are not allowed."""
    step = tl.arange(0, STEP)
    real_item = item < num_items
    real_row = row < num_rows
    item_offset = (item.to(tl.int64) * num_groups + group) * width
    row_offset = row.to(tl.int64) * width
    total = tl.zeros((ROWS, ITEMS), dtype=tl.float32)
    for start in range(0, width, STEP):
        inside = start + step < width
        q = tl.load(
            queries + row_offset[:, None] + start + step[None, :], real_row[:, None] & inside[None, :], other=0.0
        )
        x = tl.load(
            items + item_offset[None, :] + start + step[:, None], real_item[None, :] & inside[:, None], other=0.0
        )
        if FAST:
            total = tl.dot(q, x, total)
        else:  # Triton's interpreter would multiply the bits of bfloat16 as integers
            total = tl.dot(q.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    present = real_row[:, None] & real_item[None, :]
    if MASKED:
        query = (row // rows_per_query).to(tl.int64)
        mask = tl.load(allowed + query[:, None] * allowed_stride + item[None, :], mask=present, other=0)
        present = present & (mask != 0)
    # Adding 0 turns -0 into +0, because `collect_kernel` orders scores by their bits.
    return tl.where(present, total + 0.0, float("-inf"))


# See `mol_scores/kernel.py`.
_ANY_NUMBER = ["allowed_stride", "num_items", "num_rows", "num_groups", "rows_per_query"]


@triton.jit(do_not_specialize=[*_ANY_NUMBER, "num_tiles"])
def tile_maxima_kernel(
    items,  # (X, S, d)
    queries,  # (R, d) in the items' dtype
    allowed,  # (1 or B, X) uint8 where MASKED
    maxima,  # (R, S, tiles) float32
    allowed_stride,
    num_items,
    num_rows,
    num_groups,
    num_tiles,
    rows_per_query,
    width,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    W: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """The largest of every W items' dot products. Grid: (blocks of ITEMS, S, blocks of ROWS)."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    scores = _tile_scores(
        items, queries, allowed, allowed_stride, item, row, group, num_items, num_rows, num_groups, rows_per_query,
        width, ROWS, ITEMS, STEP, MASKED, FAST,
    )  # fmt: skip
    best = tl.max(tl.reshape(scores, (ROWS, ITEMS // W, W)), axis=2)
    tile = tl.program_id(0) * (ITEMS // W) + tl.arange(0, ITEMS // W)
    target = (row.to(tl.int64)[:, None] * num_groups + group) * num_tiles + tile[None, :]
    tl.store(maxima + target, best, mask=(row < num_rows)[:, None] & (tile < num_tiles)[None, :])


@triton.jit(do_not_specialize=[*_ANY_NUMBER, "capacity"])
def collect_kernel(
    items,
    queries,
    allowed,
    thresholds,  # (R, S) float32
    keys,  # (R, S, capacity) int64
    counts,  # (R, S) int32, zero at the start
    allowed_stride,
    num_items,
    num_rows,
    num_groups,
    capacity,
    rows_per_query,
    width,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Count the dot products at or above their threshold; store the first `capacity` keys.

    A key orders by (score, -row). Its upper 32 bits are an integer that orders like the score; its lower 32 bits are
    2**32 - 1 - row. Grid: as in `tile_maxima_kernel`.
    """
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    scores = _tile_scores(
        items, queries, allowed, allowed_stride, item, row, group, num_items, num_rows, num_groups, rows_per_query,
        width, ROWS, ITEMS, STEP, MASKED, FAST,
    )  # fmt: skip
    pair = row.to(tl.int64) * num_groups + group
    threshold = tl.load(thresholds + pair, mask=row < num_rows, other=float("inf"))
    hits = ((scores >= threshold[:, None]) & (scores > float("-inf"))).to(tl.int32)
    found = tl.sum(hits, axis=1)
    if tl.max(found, axis=0) > 0:
        start = tl.atomic_add(counts + pair, found, mask=(row < num_rows) & (found > 0))
        offset = start[:, None] + tl.cumsum(hits, axis=1) - hits
        bits = scores.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        key = ordered * 4294967296 + (4294967295 - item.to(tl.int64))[None, :]
        tl.store(keys + pair[:, None] * capacity + offset, key, mask=(hits > 0) & (offset < capacity))


@triton.jit(do_not_specialize=["num_values", "capacity"])
def collect_values_kernel(
    values,  # (B, n) float32
    thresholds,  # (B,) float32
    columns,  # (B, capacity) int64
    counts,  # (B,) int32, zero at the start
    num_values,
    capacity,
    BLOCK: tl.constexpr,
):
    """Count the values at or above their row's threshold; store the first `capacity` columns. Grid: (blocks of
    n, B).
    """
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + row * num_values + column, mask=column < num_values, other=float("-inf"))
    hits = ((value >= tl.load(thresholds + row)) & (value > float("-inf"))).to(tl.int32)
    found = tl.sum(hits, axis=0)
    if found > 0:
        start = tl.atomic_add(counts + row, found)
        offset = start + tl.cumsum(hits, axis=0) - hits
        tl.store(columns + row * capacity + offset, column.to(tl.int64), mask=(hits > 0) & (offset < capacity))
