"""The encoder's client with a real inference server that speaks TLS and asks for a certificate."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import certificates

from services.algorithms.bundles.model_bundle import load_bundle
from services.encoder.bootstrap import inference_encoder
from services.encoder.config import EncoderSettings
from services.platform.errors import DependencyUnavailable
from services.platform.transport import Tls
from services.stack import Ports, Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

_START_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.made(tmp_path_factory.mktemp("certificates"))


def check(address: str, bundle: Path, tls: Tls, *, speaks_tls: bool = True) -> None:
    """Ask the server for its model and one state, as the encoder does when it starts."""
    settings = EncoderSettings(
        inference_server=address, inference_server_tls=speaks_tls, bundle=bundle, **certificates.settings_of(tls)
    )
    encoder = inference_encoder(settings, load_bundle(bundle))
    try:
        encoder.check()
    finally:
        encoder.close()


@pytest.fixture(scope="module")
def address(folder: Path, small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    stack = Stack(tmp_path_factory.mktemp("stack"), ports=Ports.free(), bundle=small_bundle)
    stack.prepare(["inference-server"])
    stack.place.state.make()
    launch = stack.components["inference-server"].launch(stack.place)
    own = certificates.of(folder, "inference-server")
    flags = [
        "--grpc-use-ssl=1",
        "--grpc-use-ssl-mutual=1",
        f"--grpc-server-cert={own.certificate}",
        f"--grpc-server-key={own.key}",
        f"--grpc-root-cert={own.ca}",
    ]
    log = stack.log("inference-server")
    with log.open("wb") as output:
        running = subprocess.Popen(
            [*launch.argv, *flags], env=dict(launch.environment), cwd=launch.cwd, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + _START_S
        while "Started GRPCInferenceService" not in (said := log.read_text(errors="replace")):
            assert running.poll() is None, said[-3000:]
            assert time.monotonic() < deadline, said[-3000:]
            time.sleep(0.1)
        yield stack.address("inference-server")
    finally:
        running.terminate()
        running.wait(30)


def test_a_certificate_of_the_ca_is_answered_and_plaintext_a_foreign_and_an_expired_one_are_not(
    address: str, small_bundle: Path, folder: Path, tmp_path: Path
) -> None:
    check(address, small_bundle, certificates.of(folder, "encoder"))
    for tls in (certificates.foreign(folder, tmp_path, "encoder"), certificates.expired(folder, "encoder")):
        with pytest.raises(DependencyUnavailable):
            check(address, small_bundle, tls)
    with pytest.raises(DependencyUnavailable):
        check(address, small_bundle, certificates.of(folder, "encoder"), speaks_tls=False)
    # It was the certificate: the same server still answers.
    check(address, small_bundle, certificates.of(folder, "encoder"))
