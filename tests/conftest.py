"""How `make test` divides the tests between its processes.

A file's tests stay together, so that what its module shares is made once. All tests that start the local stack form
one group: one process runs them one after the other, and it begins with them, because they take longest. Two stacks
side by side would make each other slow, and a test that looks at the machine (shared memory, ports) would see both.
"""

import os
import sys

import pytest
import structlog
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

STACK_FOLDERS = ("tests/integration/", "tests/e2e/")
# Tests that modules of several folders import.
pytest.register_assert_rewrite("client_suite")


class FilesAndStack(LoadFileScheduling):
    """By file, in the order of collection; what starts the stack counts as one file."""

    def _split_scope(self, nodeid: str) -> str:
        return "the local stack" if nodeid.startswith(STACK_FOLDERS) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndStack | None:
    """`-n` alone divides as above; `--dist` with another value than its default has the last word."""
    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return FilesAndStack(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # By its folder, so that no file can forget to say it: `make test-fast` starts nothing.
        if item.nodeid.startswith(STACK_FOLDERS):
            item.add_marker("integration")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(STACK_FOLDERS))


@pytest.fixture(scope="session", autouse=True)
def plain_tracebacks() -> None:
    """What is logged with its traceback, often by a property that fails on purpose, is not drawn with all locals."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread_per_worker() -> None:
    """Workers share the cores; with more threads than cores, PyTorch's threads wait for each other at every barrier."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
