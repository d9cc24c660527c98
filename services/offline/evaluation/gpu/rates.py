"""The roofline of a GPU: measured rates of its tensor cores, special functions and memory.

They run in parallel, unlike a processor's units, so the least time of some work is the largest of their three times.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.offline.evaluation.common.roofline import Work
from services.offline.evaluation.common.timing import Times

# Calls a function `repeats` times, each time with the call's number, and returns each call's milliseconds.
Clock = Callable[[Callable[[int], object], int], list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRates:
    """Rates per second: multiply-adds of a large half-precision product, exponentials in registers, bytes copied."""

    multiply_adds: float
    exponentials: float
    bytes_moved: float

    def milliseconds(self, work: Work) -> float:
        """Return the work's least time. The caller counts the work's bytes in half precision."""
        times = (
            work.multiply_adds / self.multiply_adds,
            work.exponentials / self.exponentials,
            work.bytes_read / self.bytes_moved,
        )
        return 1e3 * max(times)


# Arbitrary, to try the table on a CPU.
STAND_IN = CardRates(multiply_adds=1e9, exponentials=1e8, bytes_moved=1e9)


def measure_card() -> CardRates:
    """Measure a product of 8192 x 8192, 2^32 exponentials, and a copy of 4 GB, medians of 10."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    product = _median(lambda _: torch.mm(a, b))
    # Needs Triton, so it is imported only with a GPU.
    from services.offline.evaluation.gpu.exponentials import ROUNDS, exponentials

    values = torch.rand(1 << 24, device="cuda")
    functions = _median(lambda _: exponentials(values))
    source = torch.empty(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = _median(lambda _: target.copy_(source))
    return CardRates(
        multiply_adds=8192**3 / (product / 1e3),
        exponentials=len(values) * ROUNDS / (functions / 1e3),
        bytes_moved=2 * 4 * len(source) / (copy / 1e3),
    )


def cuda_events(call: Callable[[int], object], repeats: int) -> list[float]:
    """Return milliseconds of each call, after three uncounted calls that compile and capture."""
    found = []
    for number in range(3 + repeats):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        started.record()
        call(number)
        ended.record()
        ended.synchronize()
        found.append(float(started.elapsed_time(ended)))
    return found[3:]


def wall_clock(call: Callable[[int], object], repeats: int) -> list[float]:
    """Return milliseconds of each call on a synchronous device."""
    return [1e3 * seconds for seconds in Times.of(call, range(repeats)).wall]


def _median(call: Callable[[int], object]) -> float:
    return statistics.median(cuda_events(call, 10))
