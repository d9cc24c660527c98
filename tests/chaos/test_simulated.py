"""Random trials in simulated time: contents compared with a replay of the log, answers with what they promise.

FRESHET_CHAOS_SEEDS trials from seed FRESHET_CHAOS_FIRST on. `tests/chaos/README.md` says how to go on from a failure.
"""

import json
import os
from pathlib import Path

import pytest
from memory_redis import AsyncClient, Client, MemoryServer
from reverted import REVERTED
from scenario import FAULTS, KEPT, Trial, draw

SEEDS, FIRST = int(os.environ.get("FRESHET_CHAOS_SEEDS", "160")), int(os.environ.get("FRESHET_CHAOS_FIRST", "0"))
BLOCKS = 8


def kept() -> list[object]:
    found = []
    for path in sorted(KEPT.glob("*.json")):
        reason = json.loads(path.read_text()).get("not_mended", "")
        marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)] if reason else []
        found.append(pytest.param(path, id=path.stem, marks=marks))
    return found


@pytest.mark.parametrize("path", kept())
def test_a_kept_trial_does_not_fail_again(path: Path) -> None:
    assert Trial.read(path).run() == ""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_trials_end_as_the_logs_have_it(block: int) -> None:
    for seed in range(FIRST + block, FIRST + SEEDS, BLOCKS):
        trial = draw(seed)
        violation = trial.run()
        if violation:
            smaller = trial.shrunk()
            path = smaller.keep(f"seed-{seed}", smaller.run())
            pytest.fail(f"seed {seed}, {trial.faults}: {violation}; kept in {path} with {len(smaller.steps)} steps")


def test_every_kind_of_fault_is_drawn() -> None:
    assert {kind for seed in range(200) for kind in draw(seed).faults} == {*FAULTS}


@pytest.mark.parametrize("case", ["1 eviction", "8 a restart without the topics", "10 one hash slot"])
def test_the_checker_finds_a_reverted_fix(case: str) -> None:
    """Three of them, which need few seeds; `make chaos` runs all."""
    with REVERTED[case][1]():
        assert any(draw(seed).run() for seed in range(60))


def test_clients_of_the_memory_server_differ_in_waiting_alone() -> None:
    server = MemoryServer()
    Client(server).hset("{p0}:x", "a", 1)
    assert Client(server).hmget("{p0}:x", ("a", "b")) == [b"1", None]
    assert isinstance(AsyncClient(server), Client)
