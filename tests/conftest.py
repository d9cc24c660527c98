"""How `make test` divides the tests between its processes.

A file's tests stay together, so that its module's fixtures are made once. Files that share the session's local stack
form one group, which one process runs. Files with stacks of their own are next, for the second process. Both are long,
so they begin. Further processes begin with files without a stack: these use the time in which a stack only waits, and
give way to it.
"""

import os
import sys
from collections.abc import Callable

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

STACK_FOLDERS = ("tests/integration/", "tests/e2e/")
# Files that start stacks of their own and never the session's; the longest first.
OWN_STACKS = (
    "tests/e2e/test_demo.py",
    "tests/integration/test_notebooks.py",
    "tests/integration/test_models_on_a_stack.py",
    "tests/integration/test_console.py",
    "tests/integration/test_quickstart.py",
    "tests/integration/test_shards_on_a_stack.py",
    "tests/integration/test_workers.py",
    "tests/integration/test_typescript_client.py",
    "tests/integration/test_repartition.py",
    "tests/integration/test_secured_kafka.py",
    "tests/integration/test_stack_over_tls.py",
    "tests/integration/test_archive_on_kafka.py",
    "tests/integration/test_redis_over_tls.py",
    "tests/integration/test_inference_server_over_tls.py",
    "tests/integration/test_import_attributes.py",
    "tests/integration/test_large_catalogues.py",
)
# The last of those that share the local stack: they share a compact one, too.
ON_BOTH_PROFILES = (
    "tests/integration/test_absence_on_a_stack.py",
    "tests/integration/test_client_on_stacks.py",
    "tests/integration/test_outside.py",
)
# What runs files with stacks first; at most two stacks and what their tests start run at a time.
STACK_WORKERS = ("gw0", "gw1")
# Of the other processes.
NICENESS = 5
_STOPPED_AFTER_ITS_GROUP: list[Callable[[], object]] = []
# Equal examples in every run, and none fails because a machine is slow.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
# Tests that modules of several folders import.
pytest.register_assert_rewrite("client_suite")


class FilesAndStack(LoadFileScheduling):
    """By file, in the order of collection; what shares the session's stack counts as one file."""

    def _split_scope(self, nodeid: str) -> str:
        return "the local stack" if _order(nodeid) == 0 else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id not in STACK_WORKERS:
            plain = (scope for scope, tests in self.workqueue.items() if _order(next(iter(tests))) > len(OWN_STACKS))
            if scope := next(plain, None):
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


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
        items.sort(key=lambda item: (_order(item.nodeid), item.nodeid.startswith(ON_BOTH_PROFILES)))


@pytest.fixture(scope="session")
def stopped_after_its_group() -> list[Callable[[], object]]:
    """Functions that stop a stack of several files, called when a process of `-n` has run these files.

    An idle stack takes a part of a core, which tests without one can use.
    """
    return _STOPPED_AFTER_ITS_GROUP


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if hasattr(item.config, "workerinput") and nextitem and _order(item.nodeid) != _order(nextitem.nodeid):
        for stop in _STOPPED_AFTER_ITS_GROUP:
            stop()


def _order(nodeid: str) -> int:
    """The place of a test's file: 0 for those that share a stack, then OWN_STACKS, then all others."""
    file = nodeid.partition("::")[0]
    if file in OWN_STACKS:
        return 1 + OWN_STACKS.index(file)
    return 0 if file.startswith(STACK_FOLDERS) else 1 + len(OWN_STACKS)


@pytest.fixture(scope="session", autouse=True)
def plain_tracebacks() -> None:
    """What is logged with its traceback, often by a property that fails on purpose, is not drawn with all locals."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


@pytest.fixture(scope="session", autouse=True)
def others_give_way_to_stacks() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER", STACK_WORKERS[0]) not in STACK_WORKERS:
        os.nice(NICENESS)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread_per_worker() -> None:
    """Workers share the cores; with more threads than cores, PyTorch's threads wait for each other at every barrier."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
