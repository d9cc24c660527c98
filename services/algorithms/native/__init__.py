"""The compiled CPU kernels, built at installation: one library per op and instruction set.

ctypes releases the interpreter lock.
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
def instruction_set() -> str:
    """The best of `INSTRUCTION_SETS` that this processor supports. Raises: RuntimeError without kernels."""
    return INSTRUCTION_SETS[int(_opened(Path(__file__).with_name("processor.so")).freshet_instruction_set())]


@cache
def load_kernels(op: str | Path) -> ctypes.CDLL:
    """Load the library of `ops/<op>/cpu.cpp` for this processor. op: name, or path of another folder.
    Raises: RuntimeError without kernels.
    """
    return _opened(Path(__file__).parent.parent / "ops" / op / f"cpu-{instruction_set()}.so")


def address(array: npt.NDArray[np.generic] | None) -> ctypes.c_void_p:
    """The address of a C-contiguous array, or null. The caller must keep a reference to the array during the call."""
    if array is None:
        return ctypes.c_void_p(None)
    if not array.flags.c_contiguous:
        raise ValueError(f"array of shape {array.shape} is not C-contiguous")
    return ctypes.c_void_p(array.ctypes.data)


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin on a cache line. If rows fill whole cache lines, no SIMD vector crosses a line's end."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    space = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    start = -space.ctypes.data % _CACHE_LINE
    return space[start : start + size].view(dtype).reshape(shape)


def _opened(library: Path) -> ctypes.CDLL:
    if not library.exists():
        raise RuntimeError(f"{library} is missing; build the CPU kernels: python deploy/build_kernels.py")
    return ctypes.CDLL(str(library))
