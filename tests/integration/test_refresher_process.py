"""Refresher processes on the real broker and the real Redis: killed, shared, taken over, rebuilt."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from freshet.v1 import common_pb2, events_pb2, refresher_pb2, refresher_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "refresher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from refresher_scene import P_Q, P_X, D, interaction, random_records
from retrieval_scene import make_bundle

from services.algorithms.bundles.model_bundle import Bundle
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.index_deltas import INDEX_DELTAS, Batches, decode
from services.offline.backfill.jobs import run_rebuild
from services.platform.stream.kafka import BulkProducer, Record, build_consumer, partition_for
from services.platform.stream.records import unpack_position
from services.refresher.config import RefresherSettings
from services.refresher.domain.records import Entry, Forgetting, Interaction, Undo
from services.stack import Ports

pytestmark = pytest.mark.integration

NUM_PARTITIONS = 8


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Its own model version, so that nothing another test left on the topics is ours."""
    return make_bundle(tmp_path / "bundle", seed=secrets.randbits(30), count=12, p_q=P_Q, p_x=P_X, d=D)


def encoded(entry: Entry, model_version: str, first: int = 0) -> Record:
    message = events_pb2.Attribution(user_pseudonym=entry.user)  # type: ignore[union-attr]
    if isinstance(entry, Forgetting):
        for partition, offset in entry.up_to.items():
            message.forgets.up_to.add(partition=partition, offset=offset + first)
        return Record(ATTRIBUTIONS, entry.user.encode(), message.SerializeToString())
    assert isinstance(entry, Interaction | Undo)
    message.item_id = entry.item_id
    partition, offset = unpack_position(entry.source_position)
    offset += first
    if isinstance(entry, Undo):
        message.undoes.partition, message.undoes.offset = partition, offset
    else:
        message.source.partition, message.source.offset = partition, offset
        message.type, message.value = entry.type, entry.value
        message.event_time.FromMilliseconds(entry.moment_ms)
        message.recorded_time.FromMilliseconds(time.time_ns() // 1_000_000)
        query = entry.query
        message.query_state.CopyFrom(
            common_pb2.QueryState(
                model_version=model_version,
                components=query.components,
                gate=query.gate,
                num_components=query.num_components,
                component_width=query.component_width,
            )
        )
    return Record(ATTRIBUTIONS, entry.item_id.encode(), message.SerializeToString())


def records_of(seed: int, count: int, model_version: str, first: int = 0) -> list[Record]:
    """Random records, a forgetting copied into every partition as the encoder does; from offset `first`
    on, because a position there names one interaction."""
    found = []
    prefix = secrets.token_hex(4)
    for entry in random_records(seed, count, new_items=0):
        record = encoded(replace(entry, user=f"{prefix}-{entry.user}"), model_version, first)  # type: ignore[union-attr]
        if isinstance(entry, Forgetting):
            found += [replace(record, partition=partition) for partition in range(NUM_PARTITIONS)]
        else:
            found.append(record)
    return found


class Processes:
    """Refreshers as `python -m services.refresher`, and what they say of themselves."""

    def __init__(self, settings: RefresherSettings, log: Path) -> None:
        self._settings, self._log, self._ports = settings, log, cycle(Ports.free().numbers.values())
        self.running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, name: str) -> None:
        settings, port = self._settings, next(self._ports)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")} | {
            "FRESHET_BUNDLE": str(settings.bundle),
            "FRESHET_KAFKA_BOOTSTRAP": settings.kafka_bootstrap,
            "FRESHET_REDIS_URL": settings.redis_url,
            "FRESHET_REFRESHER_CHECKPOINTS": str(settings.checkpoints),
            "FRESHET_REFRESHER_CHECKPOINT_SECONDS": "0.3",
            "FRESHET_REFRESHER_PORT": str(port),
            "FRESHET_METRICS_PORT": "0",
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "services.refresher"], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.running[name] = (child, port)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        child, _ = self.running.pop(name)
        child.send_signal(number)
        child.wait(30)

    def held(self, name: str) -> dict[int, Any]:
        """Partition -> its status, as the process says; empty while it does not answer."""
        stub_type: Any = refresher_pb2_grpc.RefresherServiceStub
        with grpc.insecure_channel(f"127.0.0.1:{self.running[name][1]}") as channel:
            try:
                status = stub_type(channel).GetStatus(refresher_pb2.GetStatusRequest(), timeout=5)
            except grpc.RpcError:
                return {}
        return {one.partition: one for one in status.partitions}

    def digests(self, names: Sequence[str], ends: dict[int, int]) -> dict[int, str]:
        """The digests once everything up to `ends` (last offsets) is folded by these."""
        held: dict[int, Any] = {}

        def all_folded() -> bool:
            held.clear()
            for name in names:
                held.update(self.held(name))
            return all(p in held and held[p].folded_offset >= last for p, last in ends.items())

        eventually(all_folded)
        return {partition: one.digest for partition, one in sorted(held.items())}


def eventually(claim: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"did not come true within {seconds:.0f} s"
        time.sleep(0.05)


@pytest.fixture
def settings(kafka: str, redis_url: str, bundle: Bundle, tmp_path: Path) -> RefresherSettings:
    return RefresherSettings(
        bundle=bundle.path, kafka_bootstrap=kafka, redis_url=redis_url, checkpoints=tmp_path / "checkpoints"
    )


@pytest.fixture
def processes(settings: RefresherSettings, tmp_path: Path) -> Iterator[Processes]:
    found = Processes(settings, tmp_path / "refreshers.log")
    yield found
    for name in list(found.running):
        with suppress(ProcessLookupError):
            found.kill(name)


def send(kafka: str, records: Sequence[Record]) -> dict[int, int]:
    """Write records; return the last offset of each partition written to."""
    producer = BulkProducer(kafka, linger_ms=5)
    last: dict[int, int] = {}
    for partition, offset in producer.send_many(records):
        last[partition] = max(offset, last.get(partition, -1))
    producer.close(1.0)
    return last


def rebuilt(settings: RefresherSettings) -> dict[int, str]:
    report = run_rebuild(settings, keep=False)
    return {one.partition: one.digest for one in report.partitions}


def test_killed_again_and_again_while_records_come_it_ends_in_the_digest_of_a_rebuild(
    kafka: str, settings: RefresherSettings, processes: Processes, bundle: Bundle
) -> None:
    seed = 1
    rng = np.random.default_rng(seed)
    ends: dict[int, int] = {}
    for life in range(3):
        processes.start("one")
        ends |= send(kafka, records_of(seed + life, 500, bundle.model_version, 1_000 * life))
        eventually(lambda: bool(processes.held("one")))
        time.sleep(rng.uniform(0, 0.6))
        processes.kill("one")
    processes.start("one")
    live = processes.digests(["one"], ends)
    assert live == rebuilt(settings)
    found = sum(one.counts["folded"] for one in processes.held("one").values())
    assert found > 500


def test_partitions_are_shared_and_taken_over_when_a_process_is_killed(
    kafka: str, settings: RefresherSettings, processes: Processes, bundle: Bundle
) -> None:
    processes.start("one")
    processes.start("two")
    eventually(lambda: len(processes.held("one")) == len(processes.held("two")) == NUM_PARTITIONS // 2)
    ends = send(kafka, records_of(1, 200, bundle.model_version))
    before = processes.digests(["one", "two"], ends)
    processes.kill("one")
    killed = time.monotonic()
    eventually(lambda: len(processes.held("two")) == NUM_PARTITIONS)
    sys.stdout.write(f"taken over {time.monotonic() - killed:.2f} s after the kill\n")
    assert processes.digests(["two"], ends) == before == rebuilt(settings)
    # A clean end hands over, too.
    processes.start("three")
    eventually(lambda: len(processes.held("three")) == NUM_PARTITIONS // 2)
    processes.kill("two", signal.SIGTERM)
    eventually(lambda: len(processes.held("three")) == NUM_PARTITIONS)
    assert processes.digests(["three"], ends) == before


def test_deltas_reach_the_topic_in_whole_batches(
    kafka: str, settings: RefresherSettings, processes: Processes, bundle: Bundle
) -> None:
    processes.start("one")
    rng = np.random.default_rng(3)
    place = (0, 10_000 + secrets.randbits(20))
    one = interaction(rng, place=place, item="item-5", user=secrets.token_hex(4), moment_ms=1_700_000_000_000)
    ends = send(kafka, [encoded(one, bundle.model_version)])
    processes.digests(["one"], ends)
    consumer = build_consumer(kafka, INDEX_DELTAS, group_id="test")
    consumer.seek_to_beginning()
    batches, mine = Batches(), {}

    def arrived() -> bool:
        for records in consumer.poll(timeout_ms=200).values():
            for record in records:
                if record.key.startswith(bundle.model_version.encode()):
                    for batch in batches.add(record.offset, decode(record.key, record.value)):
                        mine.update({delta.key: delta for delta in batch.deltas})
        return len(mine) == 2

    eventually(arrived)
    consumer.close()
    item = mine[f"{bundle.model_version}/item/item-5".encode()]
    assert item.partition == partition_for(b"item-5", NUM_PARTITIONS)
    assert item.change.num_interactions == 1
    assert 0 < item.change.model_share < 1
    assert f"{bundle.model_version}/memory/0-{place[1]}".encode() in mine


def test_an_unreadable_record_goes_to_the_dead_letters_whole(
    kafka: str, settings: RefresherSettings, processes: Processes, bundle: Bundle
) -> None:
    processes.start("one")
    mark = secrets.token_bytes(8)
    ends = send(kafka, [Record(ATTRIBUTIONS, mark, b"\xff" + mark)])
    processes.digests(["one"], ends)
    consumer = build_consumer(kafka, f"{ATTRIBUTIONS}.dead-letter", group_id="test")
    consumer.seek_to_beginning()
    letters: list[Any] = []

    def arrived() -> bool:
        for records in consumer.poll(timeout_ms=200).values():
            letters.extend(record for record in records if record.key == mark)
        return bool(letters)

    eventually(arrived)
    consumer.close()
    headers = dict(letters[0].headers)
    assert letters[0].value == b"\xff" + mark
    assert b"Attribution" in headers["freshet-reason"]
    (partition,) = ends
    assert headers["freshet-source-partition"] == str(partition).encode()
    assert headers["freshet-source-offset"] == str(ends[partition]).encode()
