"""Batch work on a real Ray cluster of two workers, one of them killed: the rows and records of a run without one."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from freshet.v1 import events_pb2
from structlog.testing import capture_logs

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.items.catalogue import catalogue_from_bundle
from services.candidates.bootstrap import load_shard_snapshot
from services.candidates.config import CandidatesSettings
from services.contracts.shards import Shard
from services.contracts.topic_reader import TopicReader
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.contracts.topics.index_deltas import INDEX_DELTAS
from services.encoder.config import EncoderSettings
from services.offline.archive.files import Archive
from services.offline.backfill.in_parts import run_parts
from services.offline.backfill.jobs import import_interactions, run_reattribution
from services.offline.backfill.scoring import caught_up
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.platform.errors import PreconditionFailed
from services.stack import Ports, Stack
from services.stack.folders import REPOSITORY

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.timeout(900)]

# One of them never had an event, and a few had so few that the gateway favours popular items for them.
PEOPLE = SimulatorConfig(
    num_users=240, num_items=400, num_topics=16, mean_events_per_user=40, max_events_per_user=120, seed=7
)
NOBODY = "nobody"


class Cluster:
    """A head node of two workers."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process, self.address = process, address

    def busy(self) -> list[psutil.Process]:
        """Workers in the middle of a part."""
        return [one for one in self._processes() if one.name().startswith("ray::_on_worker")]

    def stop(self) -> None:
        theirs = self._processes() if self.process.poll() is None else []
        # Its own end would wait half a minute for the node to drain.
        self.process.kill()
        self.process.wait(30)
        for one in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(theirs, 30)

    def _processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Outside of what outgoing connections get.
    client, port, agent, *_ = Ports.free().numbers.values()
    ports = [f"--port={port}", f"--dashboard-agent-listen-port={agent}"]
    options = ["--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats"]
    # Sockets lie below it, whose paths may be no longer than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        options += [
            f"--temp-dir={folder}",
            f"--ray-client-server-port={client}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            *ports,
        ]
        log = Path(folder) / "start.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options],
                stdout=out,
                stderr=out,
                env=environment(),
            )
        found = Cluster(process, f"ray://127.0.0.1:{client}")
        try:
            wait_for(lambda: answers(client) or process.poll() is not None, 120, "the cluster to start")
            assert process.poll() is None, log.read_text()
            yield found
        finally:
            found.stop()


@pytest.fixture
def full_stack(compact_stack: Stack, small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """Past interactions imported, the gateway serving."""
    monkeypatch.setenv("FRESHET_ENCODER_ENGINE", "in-process")
    import_interactions(
        simulate(PEOPLE),
        bundle=small_bundle,
        kafka=compact_stack.kafka_bootstrap,
        redis_url=compact_stack.redis_url,
        inference_server="127.0.0.1:9",
        attributes=False,
    )
    return compact_stack


def environment() -> dict[str, str]:
    """Without Ray's own token, which it would write into the home folder."""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "stubs")])
    patience = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120"}  # on a busy machine
    return {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": paths, **patience}


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def command(*arguments: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "services.cli", *arguments, "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def finished(process: "subprocess.Popen[str]") -> dict[str, Any]:
    said, complaints = process.communicate(timeout=400)
    assert process.returncode == 0, said + complaints
    found: dict[str, Any] = json.loads(said)
    return found


def kill_one_worker(cluster: Cluster, process: "subprocess.Popen[str]") -> None:
    """Raises: AssertionError with what the process printed, which is ended, unless two workers become busy."""
    # Both import PyTorch first: two minutes on a slow machine that runs other tests beside them.
    try:
        wait_for(lambda: len(cluster.busy()) == 2 or process.poll() is not None, 300, "two busy workers")
        assert process.poll() is None, "it ended before"
    except AssertionError as exc:
        process.kill()
        raise AssertionError(f"{exc}; it printed {process.communicate()}") from exc
    cluster.busy()[0].kill()


def test_scores_are_the_served_answers_though_a_worker_is_killed(
    full_stack: Stack, cluster: Cluster, small_bundle: Path, tmp_path: Path
) -> None:
    state, users = str(full_stack.place.state.root), tmp_path / "users.parquet"
    pq.write_table(pa.table({"user_id": [*simulate(PEOPLE).user_ids, NOBODY]}), users)
    served = tmp_path / "served.parquet"
    gateway = ("--gateway", full_stack.address("gateway"), "--timeout-ms", "10000")
    finished(command("recommend", "--batch", str(users), "--out", str(served), *gateway))
    score = ("score", "--bundle", str(small_bundle), "--state", state, "--users", str(users))
    here, on_ray, archive = tmp_path / "here.parquet", tmp_path / "ray.parquet", str(tmp_path / "archive")
    finished(command("archive", archive, "--state", state))
    finished(command(*score, "--out", str(here), "--archive", archive))
    run = command(*score, "--out", str(on_ray), "--on", cluster.address)
    kill_one_worker(cluster, run)
    finished(run)
    assert pq.read_table(on_ray).equals(pq.read_table(here))

    answered = {row["user_id"]: row for row in pq.read_table(served).to_pylist()}
    scored = {row["user_id"]: row for row in pq.read_table(on_ray).to_pylist()}
    assert scored.keys() == answered.keys()
    assert scored.pop(NOBODY)["degradations"] == ["no_state"]
    marked = {user_id for user_id, row in scored.items() if row["degradations"]}
    assert len(marked) < len(scored) / 2
    for user_id in scored.keys() - marked:
        mine, theirs = scored[user_id], answered[user_id]
        assert mine["item_ids"] == theirs["item_ids"], user_id
        # States are of half precision: the live one may have been rounded elsewhere.
        assert mine["scores"] == pytest.approx(theirs["scores"], abs=1e-4)
        assert mine["index_version"] == theirs["index_version"]
        assert mine["certificate"] == theirs["certificate"] == "exact"


def attributions(stack: Stack) -> dict[tuple[int, int], events_pb2.Attribution]:
    """All of the topic by what they are of; a record that a killed worker wrote again is there once."""
    reader = TopicReader(stack.kafka_bootstrap, ATTRIBUTIONS, group_id="test")
    try:
        reader.seek(dict.fromkeys(reader.partitions(), 0))
        messages = [events_pb2.Attribution.FromString(record.value or b"") for record in reader.read_to_end()]
    finally:
        reader.close()
    return {(one.source.partition, one.source.offset): one for one in messages}


def test_attributions_are_those_of_a_run_here_though_a_worker_is_killed(
    full_stack: Stack, cluster: Cluster, small_bundle: Path
) -> None:
    state = str(full_stack.place.state.root)
    run = command("backfill-attributions", "--bundle", str(small_bundle), "--state", state, "--on", cluster.address)
    kill_one_worker(cluster, run)
    report = finished(run)
    on_ray = attributions(full_stack)
    past = simulate(PEOPLE)
    assert report["records"] == len(past)
    assert len(on_ray) == len(past) - past.num_users
    # Again here, in a group of its own: it has attributed nothing yet, and what it writes comes later.
    settings = EncoderSettings(bundle=small_bundle, kafka_bootstrap=full_stack.kafka_bootstrap)
    run_reattribution(settings, rekeys=True)
    here = attributions(full_stack)
    assert here.keys() == on_ray.keys()
    for place, mine in on_ray.items():
        theirs = here[place]
        states = [np.frombuffer(one.query_state.components, "<f2").astype(np.float32) for one in (mine, theirs)]
        np.testing.assert_allclose(*states, atol=2e-3)
        for one in (mine, theirs):
            one.ClearField("query_state")
        assert mine == theirs


def index_deltas(stack: Stack) -> int:
    """How many the topic had."""
    reader = TopicReader(stack.kafka_bootstrap, INDEX_DELTAS, group_id="test")
    try:
        return sum(reader.end_offsets().values())
    finally:
        reader.close()


def test_shards_begin_with_the_snapshots_that_ray_made(
    full_stack: Stack, cluster: Cluster, small_bundle: Path, tmp_path: Path
) -> None:
    state, bundle = str(full_stack.place.state.root), load_bundle(small_bundle)
    gateway = full_stack.address("gateway")
    user, item = simulate(PEOPLE).user_ids[0], bundle.item_ids[0]
    finished(
        command("record", "--user", user, "--item", item, "--type", "rating", "--value", "5", "--gateway", gateway)
    )
    root = tmp_path / "snapshots"
    make = ("shard-snapshots", str(root), "--shards", "2", "--bundle", str(small_bundle), "--state", state)

    wait_for(lambda: index_deltas(full_stack) > 0, 60, "the refresher to publish")
    said = finished(command(*make, "--on", cluster.address))["shards"]
    shards = [Shard(number, 2) for number in range(2)]
    loaded = [
        load_shard_snapshot(shard, catalogue_from_bundle(bundle, shard.rows(bundle.item_ids)), Path(one["path"]))
        for shard, one in zip(shards, said, strict=True)
    ]
    assert sorted(item for one in loaded for item in one.items.item_ids) == sorted(bundle.item_ids)
    # What the shard's own process does first: it takes the snapshot, and reads on from there.
    settings = CandidatesSettings(bundle=small_bundle, kafka_bootstrap=full_stack.kafka_bootstrap)
    settings = settings.model_copy(update={"shard": shards[0], "snapshots": str(root)})
    with capture_logs() as logs:
        live = caught_up(settings)
    taken = [line["path"] for line in logs if line["event"] == "snapshot_taken"]
    assert taken == [said[0]["path"]]
    assert live.catalogue.served.version.num_items == said[0]["items"]


def test_what_a_worker_refuses_is_raised_here_with_its_name(
    cluster: Cluster, small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    done: list[int] = []
    call = {7: partial(Archive.open, tmp_path / "none")}
    with pytest.raises(
        PreconditionFailed, match=rf"Ray worker on {socket.gethostname()}: {tmp_path / 'none'} is no archive"
    ):
        run_parts(call, lambda number, _: done.append(number), bundle=small_bundle, on=cluster.address)
    with pytest.raises(PreconditionFailed, match=r"broke the connection \(.*No module named .*head node"):
        run_parts({7: partial(answers, 1)}, lambda *_: None, bundle=small_bundle, on=cluster.address)
    assert done == []
