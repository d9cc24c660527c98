"""The compiled CPU kernels, where the install could build them: one library per op and instruction set.

An op's `cpu.cpp` exports plain C functions; the op declares their argument types and calls them (ctypes lets go of the
interpreter lock meanwhile). Where `load_kernels` returns None an op uses its NumPy path. Nothing here knows any op.
"""

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
_CACHE_LINE = 64


@cache
def instruction_set() -> str | None:
    """The best of `INSTRUCTION_SETS` that this processor has; None where the install built no kernels."""
    probe = Path(__file__).with_name("processor.so")
    if not probe.exists():
        return None
    return INSTRUCTION_SETS[int(ctypes.CDLL(str(probe)).freshet_instruction_set())]


@cache
def load_kernels(op: str) -> ctypes.CDLL | None:
    """The library of `ops/<op>/cpu.cpp` for this processor; None where the install built no kernels."""
    best = instruction_set()
    if best is None:
        return None
    path = Path(__file__).parent.parent / "ops" / op / f"cpu-{best}.so"
    return ctypes.CDLL(str(path)) if path.exists() else None


def address(array: npt.NDArray[np.generic] | None) -> ctypes.c_void_p:
    """Where a C-contiguous array begins, or null. The caller keeps the array alive during the call."""
    if array is None:
        return ctypes.c_void_p(None)
    if not array.flags.c_contiguous:
        raise ValueError(f"array of shape {array.shape} is not C-contiguous")
    return ctypes.c_void_p(array.ctypes.data)


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin on a cache line: vectors in rows of whole lines then never cross one."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    space = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    start = -space.ctypes.data % _CACHE_LINE
    return space[start : start + size].view(dtype).reshape(shape)
