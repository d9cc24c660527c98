"""Make equal seeds give equal results, on one machine and with one number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """Seed PyTorch's generators for a block, and restore the caller's.

    On the CPU it also fixes the order of additions: threads would else add embeddings' gradients in the order of
    arrival. On CUDA some operators have no deterministic form.
    """
    mode: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), mode.fill_uninitialized_memory
    torch.use_deterministic_algorithms(was or device == "cpu")
    mode.fill_uninitialized_memory = False
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if device != "cpu" else []):
            torch.manual_seed(seed)
            yield
    finally:
        torch.use_deterministic_algorithms(was)
        mode.fill_uninitialized_memory = filled
