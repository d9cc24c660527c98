"""Runs the kernels on a card where there is one, else in Triton's interpreter on the CPU.

Triton decides which when the kernels are imported, so that happens here, before any test, and the setting is taken
back: processes that other tests start don't see it.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
import triton.experimental.gluon.language  # noqa: F401 (decides as well, at its first import)

import services.algorithms.ops.grouped_top_k.collect
import services.algorithms.ops.mol_scores.fused  # noqa: F401

os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where kernels run in this session."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
