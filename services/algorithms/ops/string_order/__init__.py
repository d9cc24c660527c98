"""Find where ascending strings belong among other ascending strings.

A Python loop would take 5 us per string and hold the interpreter lock, so that searches wait.

Letters: n strings, m others.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.native import address, load_kernels

Data = npt.NDArray[np.uint8]
Ends = npt.NDArray[np.signedinteger[Any]]


class _Strings(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bytes_per_end", ctypes.c_int64),
    )


def rows_before(
    data: Data, ends: Ends, other_data: Data, other_ends: Ends, *, kernels: ctypes.CDLL | None = None
) -> npt.NDArray[np.int64]:
    """How many strings precede each of the others (m,), in order of bytes. Both ascend, and strings may repeat.

    Shapes: data (bytes,) and ends (n,), int32 or int64: string i is data[ends[i - 1]:ends[i]]; the others have (m,)
    ends.
    Cost:   about 2 log2(n / m) comparisons per other string. kernels: the library to call; by default the one built for
    this processor.
    """
    library = kernels or load_kernels("string_order")
    rows = np.empty(len(other_ends), dtype=np.int64)
    strings, others = _strings(data, ends), _strings(other_data, other_ends)
    library.freshet_rows_before(ctypes.byref(strings), ctypes.byref(others), address(rows))
    return rows


def _strings(data: Data, ends: Ends) -> _Strings:
    return _Strings(address(data), address(ends), len(ends), ends.itemsize)
