"""The last resort where Java or Maven is missing: librdkafka's in-process broker, from an installed confluent-kafka.

For a first look only: it keeps everything in memory, and whoever starts it says so. Run as a program it makes
Freshet's topics and serves one port; the broker itself listens on a port of its own choosing, which it names to clients
that came in through the first one.
"""

import asyncio
import ctypes
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from services.cli.stack.children import Launch
from services.cli.stack.components.component import Place, Say, inherited_environment
from services.cli.stack.compose import Service
from services.cli.stack.folders import REPOSITORY
from services.cli.stack.ports import LOOPBACK
from services.cli.stack.probes import probe_kafka
from services.common.topics import TOPICS

PACKAGE = "confluent-kafka"
_RD_KAFKA_PRODUCER = 0


@dataclass(frozen=True)
class MockBroker:
    """In Kafka's place, under Kafka's name."""

    service: Service
    name: str = "kafka"

    def missing(self) -> tuple[str, str] | None:
        return None

    def prepare(self, say: Say) -> None:
        say(self.name, f"no Java or Maven: librdkafka's broker instead, in memory only ({PACKAGE})")

    def launch(self, place: Place) -> Launch:
        module = "services.cli.stack.components.mock_broker"
        return Launch(
            argv=[sys.executable, "-m", module, str(place.ports["kafka"])],
            environment=inherited_environment(),
            cwd=REPOSITORY,
        )

    def probe(self, place: Place) -> str | None:
        return probe_kafka(place.ports.address("kafka"))

    def version(self, place: Place) -> str:
        return f"librdkafka's mock broker, in memory only, not Apache Kafka ({PACKAGE} {version(PACKAGE)})"


def mock_broker_available() -> bool:
    """Whether an installed confluent-kafka brings a librdkafka that can be loaded."""
    try:
        return _library() is not None
    except PackageNotFoundError:
        return False


def _library() -> Path | None:
    spec = find_spec("confluent_kafka")
    if spec is None or spec.origin is None:
        return None
    beside = Path(spec.origin).parent.parent / "confluent_kafka.libs"
    return next(iter(sorted(beside.glob("librdkafka*.so*"))), None)


def start_mock_cluster() -> str:
    """A broker with Freshet's topics inside this process; return its address. It lives until the process ends."""
    library = _library()
    if library is None:
        raise RuntimeError(f"no librdkafka found: {PACKAGE} is not installed here")
    rdkafka = ctypes.CDLL(str(library))
    rdkafka.rd_kafka_new.restype = ctypes.c_void_p
    rdkafka.rd_kafka_new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    rdkafka.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    rdkafka.rd_kafka_mock_cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
    rdkafka.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    rdkafka.rd_kafka_mock_cluster_bootstraps.argtypes = [ctypes.c_void_p]
    rdkafka.rd_kafka_mock_topic_create.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    why = ctypes.create_string_buffer(512)
    client = rdkafka.rd_kafka_new(_RD_KAFKA_PRODUCER, None, why, len(why))
    if not client:
        raise RuntimeError(f"librdkafka: {why.value.decode()}")
    cluster = rdkafka.rd_kafka_mock_cluster_new(client, 1)
    for topic in TOPICS:
        failed = rdkafka.rd_kafka_mock_topic_create(cluster, topic.name.encode(), topic.num_partitions, 1)
        if failed:
            raise RuntimeError(f"librdkafka does not make topic {topic.name}: error {failed}")
    return str(rdkafka.rd_kafka_mock_cluster_bootstraps(cluster).decode())


async def serve(port: int) -> None:
    """Run the broker, and carry what arrives on `port` to it."""
    host, _, inner_port = start_mock_cluster().rpartition(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(inner_port))
        await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer))

    async with await asyncio.start_server(meet, LOOPBACK, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
