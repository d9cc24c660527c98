"""Real servers with certificates of `freshet certs`: who is answered, who is not. gRPC, the metrics port, health."""

import asyncio
import contextlib
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fakes import certificates
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.gateway.config import GatewaySettings
from services.platform.config import ProcessSettings
from services.platform.metrics import serve_metrics
from services.platform.rpc import client as rpc_client
from services.platform.rpc.health_check import probe_grpc
from services.platform.rpc.server import RpcServer
from services.platform.transport import Tls
from services.stack import Ports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.made(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def foreign(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates.foreign(folder, tmp_path_factory.mktemp("elsewhere"), "gateway")


@contextlib.asynccontextmanager
async def serving(
    tls: Tls | None, kind: type[ProcessSettings] = ProcessSettings, host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    given: dict[str, Any] = certificates.settings_of(tls) if tls else {}
    settings = kind(host=host, port=0, metrics_port=0, drain_seconds=0.0, **given)
    server = RpcServer(process="test", settings=settings, add_services=lambda _: [], registry=CollectorRegistry())
    await server.start()
    yield f"{host}:{server.port}"
    await server.drain()


async def answer(address: str, tls: Tls | None) -> str:
    """SERVING, or the status of the failed call."""
    async with rpc_client.channel(address, tls=tls) as channel:
        return await asked(channel)


async def asked(channel: grpc.aio.Channel) -> str:
    try:
        said = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    except grpc.aio.AioRpcError as exc:
        return exc.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(said.status)


async def test_a_process_refuses_plaintext_and_a_client_without_a_certificate(folder: Path) -> None:
    async with serving(certificates.of(folder, "encoder")) as address:
        assert await answer(address, None) == "UNAVAILABLE"
        alone = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
        async with grpc.aio.secure_channel(address, alone) as channel:
            assert await asked(channel) == "UNAVAILABLE"


async def test_a_process_refuses_a_certificate_of_another_ca(folder: Path, foreign: Tls) -> None:
    async with serving(certificates.of(folder, "encoder")) as address:
        assert await answer(address, foreign) == "UNAVAILABLE"


async def test_a_client_refuses_a_foreign_and_an_expired_server(folder: Path, foreign: Tls) -> None:
    for server in (foreign, certificates.expired(folder, "encoder")):
        async with serving(server) as address:
            assert await answer(address, certificates.of(folder, "gateway")) == "UNAVAILABLE"


async def test_a_client_refuses_a_server_whose_certificate_does_not_name_the_host(folder: Path, tmp_path: Path) -> None:
    async with serving(certificates.of(folder, "encoder"), host="127.0.0.2") as address:
        assert await answer(address, certificates.of(folder, "gateway")) == "UNAVAILABLE"
    named = certificates.made(tmp_path, hosts=["127.0.0.2"])
    async with serving(certificates.of(named, "encoder"), host="127.0.0.2") as address:
        assert await answer(address, certificates.of(named, "gateway")) == "SERVING"


async def test_the_gateway_answers_clients_without_a_certificate_and_no_plaintext(folder: Path) -> None:
    async with serving(certificates.of(folder, "gateway"), GatewaySettings) as address:
        alone = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
        async with grpc.aio.secure_channel(address, alone) as channel:
            assert await asked(channel) == "SERVING"
        assert await answer(address, None) == "UNAVAILABLE"


async def test_renewed_and_earlier_certificates_are_believed_together(tmp_path: Path) -> None:
    folder = certificates.made(tmp_path / "certificates")
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    for name in ("encoder", "gateway"):
        for kind in ("crt", "key"):
            (earlier / f"{name}.{kind}").write_bytes((folder / f"{name}.{kind}").read_bytes())
    (earlier / "ca.crt").write_bytes((folder / "ca.crt").read_bytes())
    certificates.make_certificates(folder, renew=True)
    assert (folder / "encoder.key").read_bytes() != (earlier / "encoder.key").read_bytes()
    async with serving(certificates.of(folder, "encoder")) as address:
        assert await answer(address, certificates.of(earlier, "gateway")) == "SERVING"
    async with serving(certificates.of(earlier, "encoder")) as address:
        assert await answer(address, certificates.of(folder, "gateway")) == "SERVING"


async def test_a_health_check_shows_the_processs_certificate(folder: Path) -> None:
    async with serving(certificates.of(folder, "encoder")) as address:
        own = certificates.of(folder, "encoder")
        assert await asyncio.to_thread(probe_grpc, address, own) is None
        assert "UNAVAILABLE" in str(await asyncio.to_thread(probe_grpc, address))


def scrape(port: int, context: ssl.SSLContext | None) -> str:
    scheme = "https" if context else "http"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=5, context=context) as said:
        return str(said.read().decode())


@pytest.fixture(scope="module")
def metrics_port(folder: Path) -> int:
    port = Ports.free()["encoder-metrics"]
    serve_metrics(port, tls=certificates.of(folder, "encoder"))
    return port


def test_the_metrics_port_answers_a_certificate_of_its_ca(folder: Path, metrics_port: int) -> None:
    assert "process_cpu_seconds_total" in scrape(metrics_port, certificates.of(folder, "operator").client_context())


def test_the_metrics_port_refuses_plaintext_no_certificate_a_foreign_and_an_expired_one(
    folder: Path, foreign: Tls, metrics_port: int
) -> None:
    alone = ssl.create_default_context(cafile=folder / "ca.crt")
    expired = certificates.expired(folder, "gateway").client_context()
    for context in (None, alone, foreign.client_context(), expired):
        with pytest.raises(OSError, match=r"."):
            scrape(metrics_port, context)


def test_a_client_that_says_nothing_keeps_nobody_from_the_metrics(folder: Path, metrics_port: int) -> None:
    with contextlib.ExitStack() as idle:
        for _ in range(4):
            idle.enter_context(socket.create_connection(("127.0.0.1", metrics_port)))
        assert "process_cpu" in scrape(metrics_port, certificates.of(folder, "operator").client_context())
