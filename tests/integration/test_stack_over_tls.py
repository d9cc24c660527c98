"""The local stack with certificates: answers are whole, so each process reaches its peers; the command line, too."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fakes import certificates
from freshet.v1 import gateway_pb2, gateway_pb2_grpc

from services.algorithms.bundles.model_bundle import load_bundle
from services.stack import Ports, Stack
from services.stack.lag import Lags
from tests.unit.cli.shell import facts, refused

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

PARTS = ["kafka", "redis", "encoder", "refresher", "candidates", "reranker", "gateway"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = certificates.made(tmp_path / "certificates")
    own = certificates.of(made, "gateway")
    for variable, file in (("CERT", own.certificate), ("KEY", own.key), ("CA", own.ca)):
        monkeypatch.setenv(f"FRESHET_TLS_{variable}", str(file))
    return made


@pytest.fixture
def stack(folder: Path, small_bundle: Path, tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path / "state", bundle=small_bundle, ports=Ports.free())
    yield stack
    stack.down()


def test_a_stack_with_certificates_answers_as_one_without(
    stack: Stack, folder: Path, small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.up(PARTS, timeout_s=200)
    gateway = stack.address("gateway")
    item = load_bundle(small_bundle).item_ids[0]
    facts("record", "--user", "ann", "--item", item, "--gateway", gateway)
    deadline = time.monotonic() + 60
    while True:
        answer = facts("recommend", "--user", "ann", "--gateway", gateway, "--timeout-ms", "10000")
        if answer["items"] and not answer["degradations"]:
            break
        # The state is on its way.
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    lags = Lags.of(stack.ports, since_start=True).read()
    assert lags["the user's state"] is not None

    # A stranger has the CA alone: the gateway answers it, another process does not.
    alone = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
    request = gateway_pb2.RecommendRequest(user_id="ann", k=5)
    with grpc.secure_channel(gateway, alone) as channel:
        assert gateway_pb2_grpc.GatewayServiceStub(channel).Recommend(request, timeout=10).items
    for part in ("encoder", "refresher", "candidates", "reranker"):
        with grpc.secure_channel(stack.address(part), alone) as channel, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=1)

    for variable in ("CERT", "KEY", "CA"):
        monkeypatch.delenv(f"FRESHET_TLS_{variable}")
    refused(3, "recommend", "--user", "ann", "--gateway", gateway)
