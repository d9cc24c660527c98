"""Wall-clock and processor time of calls, after uncounted warm-up calls.

Processor time is that of all threads; it excludes waits on a busy machine.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np
import torch

from services.algorithms.native.threads import set_compute_threads

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per counted call: `wall` by the clock, `cpu` of the processor."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, call: Callable[[Asked], object], inputs: Iterable[Asked], *, warm_up: int = 0) -> Self:
        """Time one call per input; the first `warm_up` are not counted."""
        times = cls()
        for number, one in enumerate(inputs):
            if number < warm_up:
                call(one)
            else:
                times.call(call, one)
        return times

    def call(self, call: Callable[[Asked], Answer], asked: Asked) -> Answer:
        """Time one call; returns its answer."""
        began, cpu_began = time.perf_counter(), time.process_time()
        answer = call(asked)
        cpu_ended, ended = time.process_time(), time.perf_counter()
        self.cpu.append(cpu_ended - cpu_began)
        self.wall.append(ended - began)
        return answer

    @property
    def median_ms(self) -> float:
        return 1e3 * float(np.median(self.wall))

    def quantile_ms(self, share: float) -> float:
        return 1e3 * float(np.quantile(self.wall, share))

    @property
    def cpu_ms(self) -> float:
        """Median processor time."""
        return 1e3 * float(np.median(self.cpu))


def use_threads(count: int) -> None:
    """Set the threads of PyTorch and of this library's kernels."""
    torch.set_num_threads(count)
    set_compute_threads(count)
