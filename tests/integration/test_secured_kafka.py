"""Our clients with a real broker that asks who they are: SASL (PLAIN, SCRAM) in the clear and over mTLS."""

import base64
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import certificates

from services.contracts.topic_reader import TopicReader
from services.contracts.topics import ensure_topics
from services.contracts.topics.interactions import INTERACTIONS
from services.platform.config import ProcessSettings
from services.platform.errors import DependencyUnavailable
from services.platform.stream.event_producer import EventProducer
from services.platform.stream.kafka import BulkProducer, Record, build_consumer, build_producer
from services.stack import Ports, Stack
from services.stack.components.kafka import Kafka
from services.stack.probes import probe_kafka

pytestmark = pytest.mark.integration

USER, PASSWORD = "freshet", "a password of 28 characters "
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_START_S = 60.0


@dataclass(frozen=True)
class Broker:
    """A listener for SASL in the clear, one for SASL over mTLS, one for mTLS alone; and everybody's certificates."""

    sasl: str
    sasl_tls: str
    tls: str
    certificates: Path

    def settings(self, listener: str, **changes: Any) -> ProcessSettings:
        """A client's that is let in."""
        address, security = {
            "sasl": (self.sasl, "SASL_PLAINTEXT"),
            "sasl_tls": (self.sasl_tls, "SASL_SSL"),
            "tls": (self.tls, "SSL"),
        }[listener]
        given: dict[str, Any] = {
            "kafka_bootstrap": address,
            "kafka_security": security,
            "kafka_user": USER,
            "kafka_password": PASSWORD,
            **certificates.settings_of(certificates.of(self.certificates, "encoder")),
        }
        return ProcessSettings(**(given | changes))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("broker")
    made = certificates.made(folder / "certificates")
    kafka = Stack(folder / "stack").components["kafka"]
    assert isinstance(kafka, Kafka)
    kafka.prepare(lambda part, doing: None)
    inner, sasl, sasl_tls, tls, controller = list(Ports.free().numbers.values())[:5]
    properties = folder / "server.properties"
    properties.write_text(server_properties(folder, inner, sasl, sasl_tls, tls, controller))
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    scram = [f"--add-scram={one}=[name={USER},password={PASSWORD}]" for one in _MECHANISMS if one != "PLAIN"]
    java = kafka._java("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")
    tool = [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(properties), *scram]
    subprocess.run(tool, check=True, capture_output=True, timeout=120)
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen([*java, "kafka.Kafka", str(properties)], stdout=log, stderr=log, cwd=folder)
        try:
            deadline = time.monotonic() + _START_S
            while (problem := probe_kafka(f"127.0.0.1:{inner}")) is not None:
                assert running.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < deadline, problem
                time.sleep(0.1)
            ensure_topics(f"127.0.0.1:{inner}")
            yield Broker(f"127.0.0.1:{sasl}", f"127.0.0.1:{sasl_tls}", f"127.0.0.1:{tls}", made)
        finally:
            running.terminate()
            running.wait(30)


def server_properties(folder: Path, inner: int, sasl: int, sasl_tls: int, tls: int, controller: int) -> str:
    held = folder / "certificates"
    # Kafka reads key and certificate from one PEM file.
    store = folder / "kafka.pem"
    store.touch(0o600)
    store.write_bytes((held / "kafka.key").read_bytes() + (held / "kafka.crt").read_bytes())
    plain = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    listeners = f"INNER://127.0.0.1:{inner},SASL://127.0.0.1:{sasl},BOTH://127.0.0.1:{sasl_tls},TLS://127.0.0.1:{tls}"
    lines = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": (
            "INNER:PLAINTEXT,SASL:SASL_PLAINTEXT,BOTH:SASL_SSL,TLS:SSL,CONTROLLER:PLAINTEXT"
        ),
        "inter.broker.listener.name": "INNER",
        "sasl.enabled.mechanisms": ",".join(_MECHANISMS),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(held / "ca.crt"),
        "ssl.client.auth": "required",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "offsets.topic.num.partitions": "1",
        "log.dirs": str(folder / "data"),
    }
    for listener in ("sasl", "both"):
        lines[f"listener.name.{listener}.plain.sasl.jaas.config"] = plain
        for mechanism in ("scram-sha-256", "scram-sha-512"):
            lines[f"listener.name.{listener}.{mechanism}.sasl.jaas.config"] = scram
        # As the JAAS file has it: SASL over TLS asks for both.
        lines[f"listener.name.{listener}.ssl.client.auth"] = "required"
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def written_and_read(settings: ProcessSettings) -> None:
    producer = BulkProducer(settings.kafka)
    (position,) = producer.send_many([Record(INTERACTIONS, uuid.uuid4().bytes, b"value")])
    producer.close()
    reader = TopicReader(settings.kafka, INTERACTIONS, group_id="test")
    try:
        reader.seek({position.partition: position.offset})
        (found,) = reader.records_at({position.partition: position.offset}).values()
    finally:
        reader.close()
    assert found.value == b"value"


@pytest.mark.parametrize(
    ("listener", "mechanism"), [*(("sasl", one) for one in _MECHANISMS), ("sasl_tls", "SCRAM-SHA-512")]
)
def test_a_client_with_the_password_writes_and_reads(broker: Broker, listener: str, mechanism: str) -> None:
    settings = broker.settings(listener, kafka_mechanism=mechanism)
    ensure_topics(settings.kafka)
    written_and_read(settings)


def test_a_client_with_a_certificate_alone_writes_and_reads(broker: Broker) -> None:
    written_and_read(broker.settings("tls"))


def unlike(broker: Broker, case: str, elsewhere: Path) -> tuple[ProcessSettings, str]:
    """A client that is not let in, and what its error says."""
    shown = certificates.settings_of
    match case:
        case "wrong password":
            return broker.settings("sasl", kafka_password="wrong"), "SaslAuthenticationFailedError.*invalid credentials"
        case "wrong password, PLAIN":
            settings = broker.settings("sasl", kafka_password="wrong", kafka_mechanism="PLAIN")
            return settings, "SaslAuthenticationFailedError.*Invalid username or password"
        case "wrong password, right certificate":
            return broker.settings("sasl_tls", kafka_password="wrong"), "SaslAuthenticationFailedError"
        case "foreign certificate":
            foreign = certificates.foreign(broker.certificates, elsewhere, "encoder")
            return broker.settings("tls", **shown(foreign)), "certificate"
        case "expired certificate":
            return broker.settings("tls", **shown(certificates.expired(broker.certificates, "encoder"))), "certificate"
        case "foreign broker":
            return broker.settings("tls", **shown(certificates.of(certificates.made(elsewhere), "encoder"))), (
                "CERTIFICATE_VERIFY_FAILED"
            )
        case _:
            return broker.settings("tls", kafka_security="PLAINTEXT"), "cannot be reached"


@pytest.mark.parametrize(
    "case",
    [
        "wrong password",
        "wrong password, PLAIN",
        "wrong password, right certificate",
        "foreign certificate",
        "expired certificate",
        "foreign broker",
        "plaintext",
    ],
)
def test_each_client_that_is_refused_says_why_within_seconds(broker: Broker, case: str, tmp_path: Path) -> None:
    settings, why = unlike(broker, case, tmp_path)
    for ask in (
        lambda: build_producer(settings.kafka, client_id="test"),
        lambda: build_consumer(settings.kafka, INTERACTIONS, group_id="test"),
        lambda: ensure_topics(settings.kafka),
    ):
        began = time.monotonic()
        with pytest.raises(DependencyUnavailable, match=why) as refused:
            ask()
        assert PASSWORD not in str(refused.value)
        assert time.monotonic() - began < 10


async def test_the_gateways_producer_says_why_it_is_refused(broker: Broker) -> None:
    producer = EventProducer(broker.settings("sasl", kafka_password="wrong").kafka)
    try:
        with pytest.raises(DependencyUnavailable, match="SaslAuthenticationFailedError"):
            await producer.send(INTERACTIONS, b"key", b"value", timeout_s=10)
    finally:
        await producer.close()
