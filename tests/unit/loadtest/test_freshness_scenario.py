"""`python -m loadtest freshness` against a gateway whose index follows its stream with a known delay."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pyarrow as pa
import pytest
from freshet.v1 import gateway_pb2, gateway_pb2_grpc
from pyarrow import feather
from safetensors.numpy import save_file

from loadtest.command import main
from loadtest.scenarios.freshness import add_arguments
from tests.unit.loadtest.running import loadtest, summary_of

ITEMS = [f"item-{row}" for row in range(120)]


@dataclass
class LaggingGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Everybody's index shows an interaction `delay_s` after it was taken; a new item from its third user on.

    `lie`: "tokens" claims tokens with an older state, "never_refresh" keeps the index as it was after the set-up.
    """

    delay_s: float = 0.1
    lie: str = ""
    port: int = 0
    offset: int = 0
    seen: dict[str, set[str]] = field(default_factory=dict)
    served: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    put: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def RecordInteractions(self, request: Any, context: Any) -> Any:
        answer = gateway_pb2.RecordInteractionsResponse()
        with self.lock:
            for interaction in request.interactions:
                if self.lie != "never_refresh" or "prober" not in interaction.user_id:
                    visible_at = time.monotonic() + self.delay_s
                    self.served.setdefault(interaction.item_id, []).append((visible_at, interaction.user_id))
                self.seen.setdefault(interaction.user_id, set()).add(interaction.item_id)
                self.offset += 1
                answer.receipts.add(event_id=interaction.event_id).token.offset = self.offset
        return answer

    def evidence(self, item_id: str) -> list[str]:
        now = time.monotonic()
        return [user for visible_at, user in self.served.get(item_id, ()) if visible_at <= now]

    def Recommend(self, request: Any, context: Any) -> Any:
        with self.lock:
            answer = gateway_pb2.RecommendResponse(state_source="stored", token_honoured=True)
            answer.state_position.offset = self.offset - (1_000 if self.lie == "tokens" else 0)
            new = [item_id for item_id in self.put if len(set(self.evidence(item_id))) >= 3]
            allowed = request.filter.allow_item_ids or [*new, *ITEMS]
            had = set() if request.filter.allow_item_ids else self.seen.get(request.user_id, set())
            for item_id in [item_id for item_id in allowed if item_id not in had][: request.k]:
                answer.items.add(item_id=item_id, score=1.0 / (2 + len(self.evidence(item_id))), source="mol")
            answer.index_freshness.deltas_offset = self.offset
            answer.index_freshness.lag_seconds = self.delay_s
        return answer

    def Explain(self, request: Any, context: Any) -> Any:
        answer = gateway_pb2.ExplainResponse()
        with self.lock:
            answer.similarity.num_interactions = len(self.evidence(request.item_id))
        return answer

    def PutItems(self, request: Any, context: Any) -> Any:
        with self.lock:
            self.put.extend(item.item_id for item in request.items)
        return gateway_pb2.PutItemsResponse(num_written=len(request.items))


@pytest.fixture
def lagging_gateway() -> Iterator[LaggingGateway]:
    server = grpc.server(ThreadPoolExecutor(max_workers=16))
    gateway = LaggingGateway()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server)
    gateway.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield gateway
    server.stop(grace=None).wait()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    feather.write_feather(pa.table({"item_id": ITEMS, "count": list(range(len(ITEMS), 0, -1))}), folder / "items.arrow")
    components = np.random.default_rng(0).normal(size=(len(ITEMS), 2, 8)).astype(np.float32)
    save_file({"components": components}, folder / "item_states.safetensors")
    return folder


def freshness(port: int, bundle: Path, *more: str) -> subprocess.CompletedProcess[str]:
    usual = ("--event-rate", "50", "--probe-items", "10", "--num-users", "20")
    return loadtest("freshness", port, bundle, *usual, *more)


def test_the_served_lag_is_what_the_index_really_lags_and_new_items_and_tokens_are_checked(
    lagging_gateway: LaggingGateway, bundle: Path
) -> None:
    lagging_gateway.delay_s = 0.3
    finished = freshness(
        lagging_gateway.port, bundle, "--lag-seconds", "3", "--wait-seconds", "2", "--new-items", "2",
        "--audience", "3", "--probe-rate", "5",
        "--tokens", "30", "--token-rate", "30", "--windows", "0",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    summary = summary_of(finished)
    lag = summary["findings"]["event_to_index"]
    assert lag["probes"] >= 10
    assert lag["unseen"] == 0
    # Never quicker than the index, and slower only by how often it is looked at (this machine's other work aside).
    assert 290 <= lag["served_ms"]["p50"] <= 800
    assert lag["told_by_the_index_ms"]["p50"] == 300
    new = summary["findings"]["new_items"]
    assert (new["users"], new["in_time"], new["not_found"]) == (6, 6, 0)
    assert new["milliseconds"]["p50"] >= 290
    assert summary["findings"]["tokens"]["verdicts"] == {"honoured": 30}
    assert [claim["held"] for claim in summary["claims"]] == [True, True, True, None]
    assert len(lagging_gateway.put) == 2


def test_a_lying_token_fails_the_run(lagging_gateway: LaggingGateway, bundle: Path) -> None:
    lagging_gateway.lie = "tokens"
    options = ("--lag-seconds", "0", "--tokens", "10", "--windows", "0")
    finished = freshness(lagging_gateway.port, bundle, *options)
    assert finished.returncode == 1
    assert summary_of(finished)["findings"]["tokens"]["verdicts"] == {"honoured_from_an_older_state": 10}
    assert "not shown: share of 10 answers" in finished.stderr


def test_an_index_that_stands_still_fails_the_run_and_counts_what_was_never_seen(
    lagging_gateway: LaggingGateway, bundle: Path
) -> None:
    lagging_gateway.lie = "never_refresh"
    options = ("--lag-seconds", "2", "--wait-seconds", "0.5", "--new-items", "0", "--tokens", "0", "--windows", "0")
    finished = freshness(lagging_gateway.port, bundle, *options)
    assert finished.returncode == 1
    lag = summary_of(finished)["findings"]["event_to_index"]
    assert (lag["probes"], lag["unseen"] > 0) == (0, True)


def test_in_the_windows_without_refresh_the_refresher_is_stopped_and_works_again_after(
    lagging_gateway: LaggingGateway, bundle: Path
) -> None:
    refresher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        states = set()
        watching = threading.Event()

        def watch() -> None:
            while not watching.wait(0.05):
                states.add(psutil.Process(refresher.pid).status())

        watcher = threading.Thread(target=watch)
        watcher.start()
        finished = freshness(
            lagging_gateway.port, bundle, "--lag-seconds", "0", "--tokens", "0", "--windows", "2",
            "--window-seconds", "1", "--settle-seconds", "0.2", "--refresher-pid", str(refresher.pid),
        )  # fmt: skip
        watching.set()
        watcher.join()
        assert psutil.STATUS_STOPPED in states
        assert psutil.Process(refresher.pid).status() != psutil.STATUS_STOPPED
    finally:
        os.kill(refresher.pid, signal.SIGKILL)
        refresher.wait()
    cost = summary_of(finished)["findings"]["refresh_cost"]
    assert len(cost["ratios"]) == 1
    assert sorted(window["refresh"] for window in cost["windows"]) == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--windows", "3"), "num_windows=3; allowed: an even number"),
        (("--windows", "2", "--settle-seconds", "90"), "settle_s=90; allowed: 0 to less than a window's 30 s"),
        (("--windows", "2", "--state", "nowhere"), "--state=nowhere names no running stack"),
        (("--lag-seconds", "0", "--tokens", "0", "--windows", "0"), "are all 0; nothing would be measured"),
        (("--probe-items", "119"), "too few for the probes"),
        (("--event-rate", "1e6"), "--event-rate=1e+06; allowed: 0 to 5000"),
        (("--items", "nowhere"), "is not there"),
    ],
)
def test_wrong_options_of_freshness_are_refused_by_name(
    bundle: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = ("--refresher-pid", str(os.getpid())) if "--state" not in options else ()
    # Refused before anything is called, so that no greenlets are needed.
    with pytest.raises(SystemExit) as refused:
        main(["freshness", "--items", str(bundle), "--probe-items", "10", *pid, *options])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_the_state_folder_is_the_commands_own_option_or_freshets_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def state_of(*words: str) -> Path:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        state: Path = parser.parse_args(words).state
        return state

    monkeypatch.delenv("FRESHET_STATE", raising=False)
    assert state_of() == Path(".freshet")
    monkeypatch.setenv("FRESHET_STATE", "/elsewhere")
    assert state_of() == Path("/elsewhere")
    assert state_of("--state", "here") == Path("here")
