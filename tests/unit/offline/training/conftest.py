"""One thread: these tensors are too small to share, and other tests run beside."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_and_a_fixed_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
