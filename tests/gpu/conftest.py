"""Everything here needs a card; without one each test is skipped with the reason."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = not torch.cuda.is_available() and "FRESHET_GPU_TESTS_ON" not in os.environ
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
