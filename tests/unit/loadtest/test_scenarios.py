"""Each scenario's calls: when due, and whose; and what `soak` and `slow_clients` find of a small gateway."""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from loadtest.engine import LoadPlan
from loadtest.scenarios import SCENARIOS, slow_clients
from loadtest.scenarios.visits import VISITS
from tests.unit.loadtest.running import loadtest, summary_of


def built(name: str, gateway: Any, items: Path, *more: str) -> LoadPlan:
    scenario = SCENARIOS[name]
    parser = argparse.ArgumentParser()
    scenario.add_arguments(parser)
    options = parser.parse_args(["--items", str(items), "--num-users", "20", "--arrivals", "uniform", *more])
    options.seconds, options.timeout_ms, options.target = 10.0, 5_000.0, f"127.0.0.1:{gateway.port}"
    channel = grpc.insecure_channel(options.target)
    return scenario.build(options, channel, np.random.default_rng(0))


def rates(plan: LoadPlan, seconds: int = 10) -> dict[str, list[int]]:
    return {s.name: np.histogram(s.arrivals_s, np.arange(0, seconds + 1))[0].tolist() for s in plan.streams}


@pytest.mark.parametrize("name", VISITS)
def test_its_calls_are_due_in_order_and_are_answered(name: str, small_gateway: Any, items: Path) -> None:
    plan = built(name, small_gateway, items)
    plan.set_up()
    for stream in plan.streams:
        assert (np.diff(stream.arrivals_s) >= 0).all()
        assert 0 <= stream.arrivals_s[0] <= stream.arrivals_s[-1] <= 10
        stream.call()
    assert len(small_gateway.recommended) == 1
    assert small_gateway.recorded


def test_rates_change_as_the_scenario_says(small_gateway: Any, items: Path) -> None:
    storm = rates(built("event_storm", small_gateway, items))
    assert storm["record"] == [200] * 4 + [2_000] * 2 + [200] * 4
    assert storm["recommend"] == [40] * 10
    spike = rates(built("spike", small_gateway, items))
    assert (spike["recommend"][0], spike["recommend"][5]) == (40, 400)
    ramp = rates(built("ramp", small_gateway, items))["record"]
    assert ramp == sorted(ramp)
    assert ramp[-1] == pytest.approx(400, rel=0.05)


def of(gateway: Any) -> list[tuple[str, str]]:
    return [(one.user_id, one.item_id) for sent in gateway.recorded for one in sent.interactions]


def test_whose_calls_they_are(small_gateway: Any, items: Path) -> None:
    for name, number in (("flash_crowd", 30), ("hot_user", 200), ("cold_cache", 30)):
        small_gateway.recorded.clear()
        plan = built(name, small_gateway, items)
        for _ in range(number):
            plan.streams[1].call()
        users, wanted = zip(*of(small_gateway), strict=True)
        if name == "flash_crowd":
            assert len(set(wanted)) == 1 < len(set(users))
        elif name == "hot_user":
            assert 80 < Counter(users)["loadtest-0"] < 140
        else:
            assert len(set(users)) == number
            plan.streams[0].call()
            assert small_gateway.recommended[-1].user_id == users[0]


def test_long_histories_are_there_before_the_clock_starts(small_gateway: Any, items: Path) -> None:
    built("long_histories", small_gateway, items).set_up()
    assert set(Counter(user for user, _ in of(small_gateway)).values()) == {1_000}
    assert len({one.event_id for sent in small_gateway.recorded for one in sent.interactions}) == 20_000


def test_soak_tells_whose_memory_grew(small_gateway: Any, items: Path, tmp_path: Path) -> None:
    stays, grows = (
        subprocess.Popen(
            [sys.executable, "-c", f"import time\nkept = []\nprint(flush=True)\nwhile True: {work}; time.sleep(.3)"],
            stdout=subprocess.PIPE,
        )
        for work in ("kept", "kept.append(bytearray(4 << 20))")
    )
    for process in (stays, grows):
        assert process.stdout is not None
        assert process.stdout.readline()
    try:
        (tmp_path / "run").mkdir()
        for name, pid in (("gateway", stays.pid), ("encoder", grows.pid)):
            (tmp_path / "run" / f"{name}.json").write_text(json.dumps({"pid": pid}))
        finished = loadtest(
            "soak", small_gateway.port, items, "--minutes", 0.12, "--warm-minutes", 0.02, "--state", tmp_path,
            "--recommend-rate", 5, "--event-rate", 5, "--max-error-share", 1,
        )  # fmt: skip
    finally:
        for process in (stays, grows):
            process.kill()
            process.communicate()
    summary = summary_of(finished)
    held = {claim["says"].split()[2].rstrip(","): claim["held"] for claim in summary["claims"]}
    assert held == {"gateway": True, "encoder": False}, summary["findings"]
    assert finished.returncode == 1


def test_slow_clients_come_and_go_in_turns(small_gateway: Any, items: Path) -> None:
    finished = loadtest(
        "slow_clients", small_gateway.port, items, "--idle-streams", 20, "--unread", 5, "--windows", 2,
        "--window-seconds", 3, "--recommend-rate", 20, "--event-rate", 5,
    )  # fmt: skip
    found = summary_of(finished)["findings"]
    assert len(found["p99_ms"]) == 2
    # On a busy machine they may come after their window.
    assert found["windows_that_slow_clients_missed"] <= 1
    assert (found["ratio"] is None) == (found["windows_that_slow_clients_missed"] > 0)


def test_slow_clients_stop_once_they_are_answered(small_gateway: Any) -> None:
    target = f"127.0.0.1:{small_gateway.port}"
    slow = slow_clients.SlowClients(argparse.Namespace(target=target, idle_streams=20, unread=5))
    slow.begin()
    assert slow._running is not None
    process, deadline = psutil.Process(slow._running.pid), time.monotonic() + 60
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    slow.end()
    assert slow.missed == 0
    assert sum(request.k == 1_000 for request in small_gateway.recommended) == 5


def test_slow_clients_that_come_too_late_are_counted(small_gateway: Any) -> None:
    target = f"127.0.0.1:{small_gateway.port}"
    slow = slow_clients.SlowClients(argparse.Namespace(target=target, idle_streams=1, unread=0))
    for _ in range(2):
        slow.end()
        slow.begin()
    slow.end()
    assert slow.missed == 2


def test_visitors_refuse_what_would_send_nothing(small_gateway: Any, items: Path) -> None:
    with pytest.raises(ValueError, match="nothing would be sent"):
        built("steady", small_gateway, items, "--recommend-rate", "0", "--event-rate", "0")
