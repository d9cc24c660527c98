"""A GPU's special functions alone: a loop of exponentials over values in registers."""

# Triton's language, not Python's types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

ROUNDS = 256
_BLOCK = 1024


def exponentials(values: torch.Tensor) -> None:
    """Replace each value by `ROUNDS` exponentials; the number of values is a multiple of 1024."""
    _exponentials[(len(values) // _BLOCK,)](values, _BLOCK, ROUNDS, num_warps=4)


@triton.jit
def _exponentials(values, SIZE: tl.constexpr, ROUNDS_: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(values + place)
    for _ in range(ROUNDS_):
        value = tl.exp2(-value)  # between 0 and 1
    tl.store(values + place, value)
