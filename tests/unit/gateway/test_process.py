"""The gateway as a process, with everything else away: it serves, marks, drains; bad starts end with one clear line."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc

from services.algorithms.bundles.model_bundle import EncoderShape, HeadShape
from services.algorithms.scoring.states import ItemStates
from services.gateway.edge.api_keys import create_key
from services.gateway.edge.roles import Role
from services.offline.bundles.model import BundleContent, write_bundle
from services.platform.rpc.client import PEER_OPTIONS
from services.stack import Ports


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    content = BundleContent(
        encoder=EncoderShape(kind="sasrec", num_blocks=1, num_heads=1, width=4, d_qk=4, d_v=4, max_history=8),
        head=HeadShape(kind="dot", num_query_components=1, num_item_components=1, component_width=4, tau=0.05),
        weights={"w": np.zeros(1, np.float32)},
        item_states=ItemStates(components=np.full((3, 1, 4), 0.5, np.float32)),
        pair_gate=None,
        item_ids=["a", "b", "c"],
        titles=["A", "B", "C"],
        categories=[["x"], ["y"], []],
        counts=np.array([1, 3, 2]),
    )
    write_bundle(tmp_path / "bundle", content)
    return tmp_path / "bundle"


def _free_port() -> int:
    """One that no outgoing connection gets."""
    return Ports.free()["gateway"]


def channel_to(port: int) -> grpc.Channel:
    """It connects soon after the process listens."""
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=PEER_OPTIONS)


@contextmanager
def gateway(bundle: Path, port: int, **changes: str) -> Iterator[subprocess.Popen[str]]:
    nowhere = f"127.0.0.1:{_free_port()}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")} | {
        "FRESHET_BUNDLE": str(bundle),
        "FRESHET_GATEWAY_PORT": str(port),
        "FRESHET_METRICS_PORT": "0",
        "FRESHET_REDIS_URL": f"redis://{nowhere}/0",
        "FRESHET_KAFKA_BOOTSTRAP": nowhere,
        "FRESHET_ENCODER_ADDRESS": nowhere,
        "FRESHET_CANDIDATES_ADDRESS": nowhere,
        "FRESHET_RERANKER_ADDRESS": nowhere,
        **changes,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.gateway"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_with_everything_away_it_answers_popular_items_refuses_writes_and_drains(bundle: Path) -> None:
    port = _free_port()
    with gateway(bundle, port) as process, channel_to(port) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.RecommendRequest(user_id="ann", k=2)
        answer = stub.Recommend(request, timeout=30, wait_for_ready=True)
        assert [item.item_id for item in answer.items] == ["b", "c"]
        assert set(answer.degradations) == {
            gateway_pb2.DEGRADATION_STATE_STORE_DOWN,
            gateway_pb2.DEGRADATION_POPULAR_FALLBACK,
            gateway_pb2.DEGRADATION_PARTIAL_CATALOGUE,
            gateway_pb2.DEGRADATION_NOT_FRESH,
        }
        began = time.monotonic()
        write = gateway_pb2.RecordInteractionsRequest(interactions=[events_pb2.Interaction(user_id="ann", item_id="a")])
        with pytest.raises(grpc.RpcError) as caught:
            stub.RecordInteractions(write, timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def test_while_it_cannot_follow_items_its_metrics_say_since_when(bundle: Path) -> None:
    port, metrics_port = _free_port(), _free_port()
    with (
        gateway(bundle, port, FRESHET_METRICS_PORT=str(metrics_port)),
        channel_to(port) as to,
    ):
        grpc.channel_ready_future(to).result(timeout=30)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
            samples = dict(line.split(" ") for line in answer.read().decode().splitlines() if not line.startswith("#"))
    assert float(samples["freshet_gateway_turn_age_seconds"]) > 0


def test_outside_loopback_with_keys_it_serves_who_shows_one_and_audits_to_stderr(bundle: Path, tmp_path: Path) -> None:
    port, keys = _free_port(), tmp_path / "keys.json"
    secret = create_key(keys, id="shop", roles=frozenset({Role.RECOMMEND}))
    shown = (("authorization", f"Bearer {secret}"),)
    with (
        gateway(bundle, port, FRESHET_HOST="0.0.0.0", FRESHET_API_KEYS=str(keys), FRESHET_PSEUDONYM_KEY="p") as process,
        channel_to(port) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.RecommendRequest(user_id="ann", k=2)
        assert stub.Recommend(request, timeout=30, wait_for_ready=True, metadata=shown).items
        with pytest.raises(grpc.RpcError) as caught:
            stub.ForgetUser(gateway_pb2.ForgetUserRequest(user_id="ann"), timeout=10, metadata=shown)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        process.send_signal(signal.SIGTERM)
        _, audited = process.communicate(timeout=20)
        assert process.returncode == 0
    (line,) = [json.loads(line) for line in audited.splitlines() if line.startswith("{")]
    assert (line["key"], line["method"], line["status"]) == ("shop", "ForgetUser", "PERMISSION_DENIED")


def test_outside_loopback_exposures_need_a_key_of_pseudonyms(bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    create_key(keys, id="shop", roles=frozenset({Role.RECOMMEND}))
    with gateway(bundle, _free_port(), FRESHET_HOST="0.0.0.0", FRESHET_API_KEYS=str(keys)) as process:
        _, said = process.communicate(timeout=30)
        assert process.returncode != 0
    assert "FRESHET_PSEUDONYM_KEY='freshet-development', which is public" in said
