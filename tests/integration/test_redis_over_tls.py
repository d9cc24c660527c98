"""The state store over rediss:// with certificates of `freshet certs`: both sides are asked for theirs.

The launcher's own redis-server is built without TLS; where it is the one at hand, something in front of it speaks TLS.
"""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from fakes import certificates

from services.platform.config import ProcessSettings
from services.platform.errors import DependencyUnavailable
from services.platform.transport import Tls
from services.stack import Ports, Stack
from services.stack.components.redis import Redis
from services.user_state.leases import RedisLeases
from services.user_state.reader import StateReader
from services.user_state.writer import StateWriter

pytestmark = pytest.mark.integration

_START_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.made(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_port(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    component = Stack(tmp_path_factory.mktemp("redis") / "stack").components["redis"]
    assert isinstance(component, Redis)
    component.prepare(lambda part, doing: None)
    own = certificates.of(folder, "redis")
    port, plain, *_ = Ports.free().numbers.values()
    files = ["--tls-cert-file", own.certificate, "--tls-key-file", own.key, "--tls-ca-cert-file", own.ca]
    with contextlib.ExitStack() as running:
        if not serves(running, component.program(), "--port", "0", "--tls-port", str(port), *map(str, files)):
            assert serves(running, component.program(), "--port", str(plain))
            port = running.enter_context(speaking_tls(own, plain))
        yield port


def serves(running: contextlib.ExitStack, program: str, *arguments: str) -> bool:
    """Start it; False when it ended at once."""
    process = subprocess.Popen([program, *arguments, "--save", ""], stdout=subprocess.DEVNULL)
    running.callback(process.wait, 10)
    running.callback(process.terminate)
    port = next(int(argument) for argument in reversed(arguments) if argument.isdigit())
    deadline = time.monotonic() + _START_S
    while process.poll() is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def speaking_tls(own: Tls, plain: int) -> Iterator[int]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=own.ca)
    context.load_cert_chain(own.certificate, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", plain)) as inner:
            outer = context.wrap_socket(client, server_side=True)
            back = threading.Thread(target=copy, args=(inner, outer))
            back.start()
            copy(outer, inner)
            back.join()
            outer.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.close()


def url(port: int, tls: Tls) -> str:
    """As a process with these files gives it to its clients."""
    return ProcessSettings(redis_url=f"rediss://127.0.0.1:{port}/0", **certificates.settings_of(tls)).redis


async def test_every_client_of_ours_works_over_tls(folder: Path, tls_port: int) -> None:
    address = url(tls_port, certificates.of(folder, "encoder"))
    writer, reader = StateWriter(address), StateReader(address, timeout_s=5)
    epoch, _ = writer.ensure_epoch(8)
    assert (await reader.read_user("ann", "model")).epoch == epoch
    leases = RedisLeases(address, process="test", group="tls", lease_ms=1_000, timeout_s=5)
    leases.start([0])
    deadline = time.monotonic() + 10
    while not leases.holding().terms:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    leases.close()
    writer.close()
    await reader.close()


@pytest.mark.parametrize(
    "shown",
    [
        lambda folder, other: certificates.foreign(folder, other, "encoder"),
        lambda folder, other: certificates.expired(folder, "encoder"),
        lambda folder, other: certificates.of(certificates.made(other), "encoder"),
    ],
    ids=["foreign certificate", "expired certificate", "foreign server"],
)
def test_neither_side_believes_another_certificate(
    shown: Callable[[Path, Path], Tls], folder: Path, tls_port: int, tmp_path: Path
) -> None:
    writer = StateWriter(url(tls_port, shown(folder, tmp_path)))
    with pytest.raises(DependencyUnavailable):
        writer.epoch()
    writer.close()


def test_a_client_without_a_certificate_is_refused(folder: Path, tls_port: int) -> None:
    alone = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={folder / 'ca.crt'}"
    with redis.Redis.from_url(alone) as client, pytest.raises(redis.ConnectionError):
        client.ping()
