"""One refresher with everybody in it: how long a checkpoint holds it up, whether it loses a lease, how soon another
process takes over.

The question: do two million users with twenty interactions each, over eight partitions, fit into one refresher? The
state is made up (sums are random numbers; the ledger's rows are as folding would have left them) and written as
checkpoints; then the real processes run on a real broker and a real Redis of their own, under live attributions.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import redis

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.cli.refresher_rate import attributions
from services.contracts.topics import ensure_topics
from services.contracts.topics.attributions import ATTRIBUTIONS
from services.platform.stream.kafka import BulkProducer, Record, partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.refresher.bootstrap import checkpoint_topic, fold_rules
from services.refresher.config import RefresherSettings
from services.refresher.domain.ledger import FORGOTTEN_SHARDS, Ledger
from services.refresher.domain.ledger_rows import BLOCK_ROWS
from services.refresher.domain.partition import SHARD_ITEMS, Partition
from services.refresher.domain.records import hash_text
from services.refresher.handlers.checkpoints import snapshot
from services.stack import Ports, Stack

_START_S = 1_700_000_000
_SPREAD_S = 90 * 86_400
_PATIENCE_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What was measured. first_takeover_s, shared_s, cold_takeover_s: from the start of a process until it held all, or
    half of all; cold_start_s: of that, until its first line. takeover_s: from the kill of one that held half until the
    other one held all. takeover_cpu_s: processor time of taking all over. load_average: of the machine, at the end."""

    users: int
    interactions: int
    checkpoint_bytes: int
    filled_s: float
    first_takeover_s: float
    memory_bytes: int
    live_records: int
    checkpoints: int
    longest_pause_ms: float
    pauses_p50_ms: float
    longest_pause_cpu_ms: float
    longest_checkpoint_s: float
    leases_lost: int
    shared_s: float
    takeover_s: float
    cold_takeover_s: float
    cold_start_s: float
    takeover_cpu_s: float
    load_average: float


def measure(bundle: Path, folder: Path, *, users: int, each: int, rate: int, seconds: float, seed: int = 0) -> Size:
    """Fill, run, kill and take over, in a stack of its own under `folder`."""
    stack = Stack(folder / "stack", ports=Ports.free())
    stack.up(["kafka", "redis"])
    try:
        ensure_topics(stack.kafka_bootstrap)
        model = load_bundle(bundle)
        settings = RefresherSettings(
            bundle=bundle,
            kafka_bootstrap=stack.kafka_bootstrap,
            redis_url=stack.redis_url,
            checkpoints=folder / "none",
            checkpoint_seconds=10,
        )
        began = time.monotonic()
        num_bytes = _fill(settings, model, users, each, np.random.default_rng(seed))
        filled_s = time.monotonic() - began
        first = _Process(settings, folder / "first.log")
        first_s, _ = first.wait_for(NUM_PARTITIONS)
        written = _live(settings, model, users, rate, seconds, seed)
        memory = int(Path(f"/proc/{first.child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        with redis.Redis.from_url(stack.redis_url) as client:
            terms = [
                int(client.get(f"refresher:{{{model.model_version}}}:term:{number}") or 0)
                for number in range(NUM_PARTITIONS)
            ]
        second = _Process(settings, folder / "second.log")
        shared_s, _ = second.wait_for(NUM_PARTITIONS // 2)
        first.kill()
        took_s, _ = second.wait_for(NUM_PARTITIONS)
        second.kill()
        third = _Process(settings, folder / "third.log")
        cold_s, start_s = third.wait_for(NUM_PARTITIONS)
        third.kill()
        pauses = [event["pause_ms"] for event in first.events("checkpoint_begun")]
        return Size(
            users=users,
            interactions=users * each,
            checkpoint_bytes=num_bytes,
            filled_s=round(filled_s, 1),
            first_takeover_s=round(first_s, 2),
            memory_bytes=memory,
            live_records=written,
            checkpoints=len(pauses),
            longest_pause_ms=max(pauses),
            pauses_p50_ms=float(np.median(pauses)),
            longest_pause_cpu_ms=max(event["cpu_ms"] for event in first.events("checkpoint_begun")),
            longest_checkpoint_s=max(event["seconds"] for event in first.events("checkpoint_kept")),
            leases_lost=len(list(first.events("partitions_lost"))) + sum(term != 1 for term in terms),
            shared_s=round(shared_s, 2),
            takeover_s=round(took_s, 2),
            cold_takeover_s=round(cold_s, 2),
            cold_start_s=round(start_s, 2),
            takeover_cpu_s=round(sum(event["cpu_s"] for event in third.events("partition_taken_over")), 2),
            load_average=round(os.getloadavg()[0], 1),
        )
    finally:
        stack.down()


class _Process:
    """A refresher process, and what it logs."""

    def __init__(self, settings: RefresherSettings, log: Path) -> None:
        self._log, self._began = log, time.time()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")} | {
            "FRESHET_BUNDLE": str(settings.bundle),
            "FRESHET_KAFKA_BOOTSTRAP": settings.kafka_bootstrap,
            "FRESHET_REDIS_URL": settings.redis_url,
            "FRESHET_REFRESHER_CHECKPOINTS": str(settings.checkpoints),
            "FRESHET_REFRESHER_CHECKPOINT_SECONDS": str(settings.checkpoint_seconds),
            "FRESHET_REFRESHER_PORT": "0",
            "FRESHET_METRICS_PORT": "0",
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "services.refresher"], env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def events(self, name: str) -> Iterator[Mapping[str, Any]]:
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and f'"{name}"' in line:
                event = json.loads(line)
                if event.get("event") == name:
                    yield event

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def wait_for(self, count: int) -> tuple[float, float]:
        """Seconds until so many partitions were taken over from checkpoints, from now (from its start where it has just
        begun), and until its first line."""
        began = time.time()
        while len(taken := list(self.events("partition_taken_over"))) < count:
            if self.child.poll() is not None or time.time() - began > _PATIENCE_S:
                raise RuntimeError(f"the refresher has not taken over: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)
        if len(list(self.events("checkpoint_taken"))) < count:
            raise RuntimeError(f"a partition was not taken from its checkpoint: {self._log.read_text()[-2000:]}")
        first = next(iter(self.events("settings")))
        return _moment(taken[count - 1]) - began, _moment(first) - self._began


def _moment(event: Mapping[str, Any]) -> float:
    """When a line was logged, Unix seconds."""
    return float(np.datetime64(str(event["timestamp"]).rstrip("Z"), "us").astype(np.int64)) / 1e6


def _fill(settings: RefresherSettings, bundle: Bundle, users: int, each: int, rng: np.random.Generator) -> int:
    """Write a checkpoint of every partition; returns their bytes."""
    rules = fold_rules(settings, bundle)
    popularity = bundle.counts + 1.0
    count = users * each
    user_of = (rng.permutation(count) % users).astype(np.int32)
    item_of = rng.choice(bundle.num_items, size=count, p=popularity / popularity.sum()).astype(np.int32)
    homes = np.array([partition_for(item_id.encode(), NUM_PARTITIONS) for item_id in bundle.item_ids])
    hashes = np.array([hash_text(f"{user:032x}") for user in range(users)], np.uint64)
    kept = checkpoint_topic(settings, bundle.model_version)
    num_bytes = 0
    for number in range(NUM_PARTITIONS):
        rows = np.flatnonzero(homes[item_of] == number)
        state = _made_up(Partition(number, rules, {}), bundle, rows, user_of[rows], item_of[rows], hashes, count, rng)
        taken = snapshot(state, {})
        parts = taken.parts()
        num_bytes += sum(len(data) for data in parts.values() if data is not None)
        kept.save(number, taken.values, parts)
    kept.close()
    return num_bytes


def _made_up(
    state: Partition,
    bundle: Bundle,
    rows: np.ndarray,
    users: np.ndarray,
    items: np.ndarray,
    hashes: np.ndarray,
    count: int,
    rng: np.random.Generator,
) -> Partition:
    """A partition that holds these interactions. Their attributions lie before the log's beginning."""
    held, numbers = np.unique(items, return_inverse=True)
    seconds = _START_S + rows * _SPREAD_S // count
    columns = {
        "users": hashes[users],
        "positions": (users.astype(np.int64) % NUM_PARTITIONS) << 48 | rows,
        "offsets": np.arange(-len(rows), 0),
        "items": numbers.astype(np.uint32),
        "seconds": seconds,
    }
    blocks = [
        {name: values[start : start + BLOCK_ROWS] for name, values in columns.items()}
        for start in range(0, len(rows), BLOCK_ROWS)
    ]
    newest = {source: (source << 48) + count for source in range(NUM_PARTITIONS)}
    state.ledger = Ledger.restored(blocks, np.zeros(0, np.int64), [{}] * FORGOTTEN_SHARDS, [0, 0], newest)
    item_ids = [bundle.item_ids[item] for item in held.tolist()]
    for item_id in item_ids:
        state.numbers.get(item_id)
    counts = np.bincount(numbers)
    shape = (len(held), state.rules.items.num_components, state.rules.items.width)
    state.sums.put(
        item_ids,
        {
            "num_segments": np.ones(len(held), np.int64),
            "segments": np.zeros(len(held), np.int64),
            "sums": rng.integers(-(1 << 40), 1 << 40, shape),
            "weights": counts << 30,
            "counts": counts,
            "last": np.full(len(held), _START_S + _SPREAD_S),
            "times_mix": np.zeros(len(held), np.uint64),
        },
    )
    state.numbers.shard_versions = [1] * -(-len(held) // SHARD_ITEMS)
    state.outgoing.published = dict.fromkeys(item_ids, 0.5)
    state.time.stream_ms = 1000 * (_START_S + _SPREAD_S)
    return state


def _live(settings: RefresherSettings, bundle: Bundle, users: int, rate: int, seconds: float, seed: int) -> int:
    """Write attributions of these users at a rate; returns how many."""
    producer = BulkProducer(settings.kafka_bootstrap, linger_ms=5)
    total = int(rate * seconds)
    began, written = time.monotonic(), 0
    values = attributions(bundle, total, np.random.default_rng(seed + 1), users=users, first=10**9)
    while batch := list(islice(values, max(1, rate // 10))):
        producer.send_many([Record(ATTRIBUTIONS, item_id.encode(), value) for item_id, value in batch])
        written += len(batch)
        time.sleep(max(0.0, began + written / rate - time.monotonic()))
    producer.close()
    return written
