"""Writes the files beside this one. It runs on commit d00231b only: today's modules have other names.

    git worktree add --detach /tmp/old d00231b    # with that commit's packages and compiled kernels
    cd /tmp/old && PYTHONPATH=.:stubs python <here>/make_golden.py <here>

Everything comes from the built-in simulator with fixed seeds, so no person stands behind any record. The one input from
the machine is Redis: the real Lua scripts write into a server that the stack of that commit starts on a free port.
"""

import asyncio
import dataclasses
import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
from prometheus_client import CollectorRegistry
from services.algorithms.models.sequential import Dropouts
from services.common.events import Interaction, encode_interaction
from services.common.forgets import Forget, encode_forget
from services.common.index_deltas import Batches, decode
from services.common.items import CatalogueItem, encode_item
from services.common.topics import ATTRIBUTIONS, FORGETS, INDEX_DELTAS, INTERACTIONS, ITEMS
from services.datasets import Interactions
from services.datasets.simulator import SimulatorConfig, simulate
from services.encoder.adapters.in_memory import MemoryForgetLog, MemoryStream
from services.refresher.adapters.in_memory import LeaseTable, MemoryLeases, MemoryLog
from services.training import TrainConfig, train
from services.training.bundling import save_bundle
from services.training.export import export_bundle
from services.training.new_items import measure_new_item_length
from services.training.presets import with_dot_head, with_sasrec

from services.algorithms.bundle import ENCODER_ONNX, ENCODER_STEP_ONNX, Bundle, load_bundle
from services.algorithms.filters import ItemFilter
from services.algorithms.indexes.mutable.index import IndexFullError
from services.algorithms.manifest import EncoderShape, HeadShape
from services.algorithms.packed_state import unpack_query_state
from services.candidates.bootstrap import load_catalogue, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.domain import SearchQuery, Stage
from services.candidates.metrics import CandidatesMetrics
from services.cli.stack import Ports, Stack
from services.common import state_layout
from services.common.catalogue_changes import CatalogueChanges
from services.common.kafka import Record, partition_for
from services.common.state_store import StateReader, StateWriter
from services.encoder.adapters.in_process import InProcessEncoder
from services.encoder.adapters.kafka_outbox import KafkaOutbox
from services.encoder.bootstrap import vocabulary_of
from services.encoder.forgetting import Forgotten
from services.encoder.handlers.apply_records import ApplyRecords
from services.encoder.handlers.forget_users import ForgetUsers
from services.refresher.adapters.checkpoint_files import CheckpointFiles
from services.refresher.adapters.decoding import QueryShape, decode_attribution
from services.refresher.adapters.kafka_outbox import KafkaOutbox as RefresherOutbox
from services.refresher.bootstrap import fold_rules, new_item_share
from services.refresher.config import RefresherSettings
from services.refresher.consumer import Refresher, RefresherLimits
from services.refresher.domain.records import SourceRecord
from services.refresher.handlers.describe import Held
from services.refresher.handlers.publish import Publisher
from services.refresher.metrics import RefresherMetrics

PARTITIONS = 2
NOW_MS = 1_750_000_000_000
EPOCH = "d00231bd00231b00"
PSEUDONYM_KEY = b"golden"
CONFIG = TrainConfig(
    encoder=EncoderShape(
        kind="hstu",
        num_blocks=1,
        num_heads=2,
        width=16,
        d_qk=8,
        d_v=8,
        max_history=16,
        num_time_buckets=32,
        uses_user_index=True,
        num_item_buckets=4,
    ),
    head=HeadShape(
        kind="mol", num_query_components=3, num_item_components=2, component_width=8, tau=0.05, gate_hidden=8
    ),
    epochs=1,
    dropouts=Dropouts(encoder=0.1, item=0.1, gate=0.1, user=0.2),
    num_negatives=8,
    batch_sequences=16,
    learning_rate=5e-3,
    warmup_fraction=0.1,
    final_rate_fraction=0.1,
    user_norm_weight=0.1,
    bucket_probability=0.1,
)
DOT = with_dot_head(
    dataclasses.replace(CONFIG, bucket_probability=0.0, encoder=dataclasses.replace(CONFIG.encoder, num_item_buckets=0))
)


class Topics:
    """Stands for Kafka's producer: keeps every record as it would lie in its topic."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._ends: dict[tuple[str, int], int] = defaultdict(int)

    def num_partitions(self, topic: str) -> int:
        return PARTITIONS if topic in (INTERACTIONS, ATTRIBUTIONS) else 1

    def send_many(self, records: Iterable[Record], timeout_s: float = 15.0) -> list[tuple[int, int]]:
        return [self.add(record) for record in records]

    def add(self, record: Record, recorded_ms: int = NOW_MS, content: Any = None) -> tuple[int, int]:
        partition = record.partition
        if partition is None:
            partition = partition_for(record.key, self.num_partitions(record.topic))
        offset = self._ends[record.topic, partition]
        self._ends[record.topic, partition] += 1
        self.records[record.topic].append(
            {
                "partition": partition,
                "offset": offset,
                "recorded_ms": recorded_ms,
                "key": record.key.hex(),
                "value": record.value.hex(),
                "headers": [[name, text.hex()] for name, text in record.headers],
                "content": content,
            }
        )
        return partition, offset

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing is held."""


class NotingOutbox(KafkaOutbox):
    """Publishes as Kafka's outbox does, and notes beside each record the object that it was made of."""

    def __init__(self, topics: Topics) -> None:
        super().__init__(topics)
        self._topics = topics

    def publish(self, attributions: Sequence[Any], dead_letters: Sequence[Any], clicks: Sequence[Any] = ()) -> None:
        for kind, objects in (("attributions", attributions), ("dead", dead_letters), ("clicks", clicks)):
            for one in objects:
                before = {name: len(records) for name, records in self._topics.records.items()}
                args = {"attributions": ([one], [], []), "dead": ([], [one], []), "clicks": ([], [], [one])}[kind]
                super().publish(*args)
                for name, records in self._topics.records.items():
                    for record in records[before.get(name, 0) :]:
                        record["content"] = plain(one)


def plain(value: Any) -> Any:
    """Dataclasses, bytes and arrays as JSON; a dataclass says its class."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "hex": np.ascontiguousarray(value).data.hex()}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    return value


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=None, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")


def training_data() -> tuple[Interactions, Interactions]:
    """What is trained on, and what comes later."""
    world = simulate(
        SimulatorConfig(
            num_users=48, num_items=48, num_topics=8, mean_events_per_user=12, max_events_per_user=30, days=60, seed=14
        )
    )
    boundary = len(world) * 11 // 20
    return world.select(slice(0, boundary)), world.select(slice(boundary, len(world)))


def write_interactions(path: Path, data: Interactions) -> None:
    columns = {name: getattr(data, name).tolist() for name in ("users", "items", "timestamps", "values", "types")}
    names = ("user_ids", "item_ids", "type_names", "titles", "categories", "name", "source")
    write(path, columns | {name: plain(getattr(data, name)) for name in names} | {"fingerprint": data.fingerprint()})


def make_bundle(path: Path, config: TrainConfig, data: Interactions) -> None:
    report = train(config, data)
    told = {"name": data.name, "source": data.source, "training": {"config": config.as_dict()}}
    length = measure_new_item_length(report.model, data)
    save_bundle(path, report, data, data=told, metrics={}, new_item_length=length)
    export_bundle(path, interactions=data)


def make_training(out: Path, data: Interactions) -> None:
    """Two checkpoints, each stopped within its second epoch, and what that commit made of them at the end."""
    for name, config in (("mixture", CONFIG), ("dot", DOT)):
        two = dataclasses.replace(config, epochs=2, seed=3)
        train(two, data, out=out / name, stop_after_batches=4)
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copytree(out / name, Path(scratch) / "copy")
            report = train(two, data, out=Path(scratch) / "copy", resume=True)
        weights = {key: plain(value.numpy()) for key, value in report.model.state_dict().items()}
        write(
            out / f"{name}.json",
            {
                "config": two.as_dict(),
                "positions": report.positions,
                "epoch_losses": report.epoch_losses,
                "weights": weights,
            },
        )


def make_interactions(later: Interactions, topics: Topics) -> MemoryStream:
    """The stream: Protobuf, JSON, undos, search clicks, unknown items, a duplicate, a record that nobody can read."""
    stream = MemoryStream(PARTITIONS)

    def append(record: Record, recorded_ms: int, content: Any) -> None:
        partition, _ = topics.add(record, recorded_ms, content)
        stream.append(partition, record.key, record.value, recorded_ms, record.headers)

    for row in range(len(later)):
        at_ms = int(later.timestamps[row]) * 1000
        kind, query, item = "rating", "", later.item_ids[later.items[row]]
        if row % 11 == 4:
            kind, query = "search_click", f"words for {item}"
        if row % 9 == 5:
            item = f"new-{row % 2}"
        one = Interaction(
            user_id=later.user_ids[later.users[row]],
            item_id=item,
            event_id=f"event-{row}",
            type=kind,
            value=float(later.values[row]),
            event_time_ms=at_ms,
            context={"page": "home"} if row % 7 == 0 else {},
            query=query,
        )
        if row % 6 == 3:
            document = {
                "user_id": one.user_id,
                "item_id": one.item_id,
                "event_id": one.event_id,
                "type": one.type,
                "value": one.value,
                "event_time": at_ms // 1000,
                "context": dict(one.context),
                "query": one.query,
            }
            value, headers = json.dumps(document).encode(), [("content-type", b"application/json")]
        else:
            value, headers = encode_interaction(one), []
        append(Record(INTERACTIONS, one.user_id.encode(), value, headers), at_ms + 250, plain(one))
        if row == 20:
            append(Record(INTERACTIONS, one.user_id.encode(), value, headers), at_ms + 300, plain(one))
        if row in (12, 30):
            undo = Interaction(
                user_id=one.user_id, event_id=f"undo-{row}", undoes_event_id=one.event_id, event_time_ms=at_ms + 1
            )
            append(Record(INTERACTIONS, undo.user_id.encode(), encode_interaction(undo)), at_ms + 400, plain(undo))
        if row == 15:
            append(Record(INTERACTIONS, b"9", b"\xff\xff", [("trace", b"t")]), at_ms + 500, None)
    return stream


def encode_stream(bundle: Bundle, stream: MemoryStream, store: StateWriter, topics: Topics) -> dict[str, Any]:
    """Apply two thirds, forget one user, apply the rest."""
    step = bundle.file(ENCODER_STEP_ONNX) if ENCODER_STEP_ONNX in bundle.manifest.files else None
    encoder = InProcessEncoder(bundle.file(ENCODER_ONNX), step, max_history=bundle.max_history, cache_bytes=1 << 20)
    forgotten, log, outbox = Forgotten(), MemoryForgetLog(), NotingOutbox(topics)
    handler = ApplyRecords(
        store=store,
        outbox=outbox,
        encoder=encoder,
        vocabulary=vocabulary_of(bundle),
        pseudonym_key=PSEUDONYM_KEY,
        forgotten=forgotten,
        clock_ms=lambda: NOW_MS,
    )
    forgets = ForgetUsers(
        log=log,
        store=store,
        outbox=outbox,
        encoder=encoder,
        forgotten=forgotten,
        model_version=bundle.model_version,
        pseudonym_key=PSEUDONYM_KEY,
        reader="0",
    )
    handler.resync(stream)
    forgets.resync(handler.epoch, stream.end_offsets())
    batches = [[record for log in stream.log for record in log[: len(log) * 2 // 3]]]
    batches.append([record for log in stream.log for record in log[len(log) * 2 // 3 :]])
    handler.apply(batches[0])
    keys = [[record.key or b"" for record in batch] for batch in batches]
    # Somebody who goes on afterwards, and who lost the most.
    user_id = max(sorted(set(keys[0]) & set(keys[1])), key=keys[0].count).decode()
    forget = Forget(
        forget_id="forget-1",
        user_id=user_id,
        up_to={partition: handler.watermarks[partition] for partition in range(PARTITIONS)},
        requested_ms=NOW_MS,
    )
    topics.add(Record(FORGETS, user_id.encode(), encode_forget(forget)), NOW_MS, plain(forget))
    log.append(forget)
    forgets.follow()
    handler.apply(batches[1])
    return {"first_batch": {p: len(log) * 2 // 3 for p, log in enumerate(stream.log)}, "forgotten_user": user_id}


async def describe_store(url: str, users: Sequence[str], version: str) -> dict[str, Any]:
    """What that commit's reader says of every user and of the stream."""
    reader = StateReader(url, timeout_s=5.0)
    epoch, progress = await reader.read_progress(PARTITIONS)
    found: dict[str, Any] = {}
    for user in users:
        view = await reader.read_user(user, version)
        found[user] = {
            "state": plain(view.state),
            "seen": view.seen,
            "events": plain([tuple(event) for event in await reader.read_events(user)]),
            "keys": plain(await reader.read_keys(user)),
        }
    await reader.close()
    return {"epoch": epoch, "progress": plain(progress), "users": found}


def describe_histories(store: StateWriter, users: Sequence[str]) -> dict[str, Any]:
    """What that commit's writer goes on from."""
    return {
        user: {
            "recent": [list(entry) for entry in history.recent],
            "positions": plain(history.positions),
            "forgotten": plain(history.forgotten),
            "expected": history.expected.hex(),
        }
        for user, history in store.load_users(users, EPOCH).items()
    }


def refresh(bundle: Bundle, bundle_dir: Path, topics: Topics, out: Path) -> None:
    """Fold the attributions through the log in memory; checkpoints, index deltas, and what was folded."""
    settings = RefresherSettings(bundle=bundle_dir, port=0, metrics_port=0, min_users=2, max_remembered=16)
    head = bundle.manifest.head
    shape = QueryShape(
        model_version=bundle.model_version,
        num_components=head.num_query_components,
        component_width=head.component_width,
        num_pairs=head.num_pairs,
    )
    log = MemoryLog(PARTITIONS)
    broken = Record(ATTRIBUTIONS, b"1", b"\xff", partition=0)
    topics.add(broken)
    for record in topics.records[ATTRIBUTIONS]:
        source = SourceRecord(
            ATTRIBUTIONS,
            record["partition"],
            record["offset"],
            record["recorded_ms"],
            bytes.fromhex(record["key"]),
            bytes.fromhex(record["value"]),
        )
        entry = decode_attribution(source, shape)
        record["decoded"] = plain(entry)
        log.append(record["partition"], entry)
    # new-1 is listed, new-0 stays unknown: its interactions are parked.
    log.put("new-1", title="A new one")
    rules, held, withdrawn = fold_rules(settings, bundle), Held(), dict[str, bool]()
    refresher = Refresher(
        log=log,
        outbox=RefresherOutbox(topics),
        checkpoints=CheckpointFiles(out),
        leases=MemoryLeases(LeaseTable(lambda: 0), "golden"),
        rules=rules,
        publisher=Publisher(
            share=_share(settings), min_users=2, withdrawn=withdrawn, new_share=new_item_share(settings, bundle)
        ),
        withdrawn=withdrawn,
        held=held,
        metrics=RefresherMetrics(CollectorRegistry()),
        limits=RefresherLimits(publish_s=0.0, checkpoint_s=3600.0, sweep_s=0.0, house_s=0.0, poll_ms=1),
    )
    for _ in range(20):
        refresher.step()
    folded = {}
    for number, state in held.partitions.items():
        assert not state.dirty_items, "everything is published"
        parked, parked_arrays = state.parked.to_arrays()
        folded[str(number)] = {
            "rules": rules.text,
            "folded_offset": state.folded_offset,
            "stream_ms": state.stream_ms,
            "newest_recorded_ms": state.newest_recorded_ms,
            "counts": dict(state.counts),
            "sums": plain(state.sums.to_arrays()),
            "memory": plain(state.memory.to_arrays()),
            "visible": sorted(state.visible),
            "ledger_users": state.ledger.users(),
            "ledger": plain(state.ledger.to_arrays()),
            "parked_items": parked,
            "parked": plain(parked_arrays),
            "contributors": {item: list(users) for item, users in sorted(state.takers.items())},
            "published": dict(sorted(state.published.items())),
        }
    write(out / "folded.json", folded)
    refresher.finish()  # writes the checkpoints
    for record in topics.records[INDEX_DELTAS]:
        record["content"] = plain(decode(bytes.fromhex(record["key"]), bytes.fromhex(record["value"])))


def _share(settings: RefresherSettings) -> Any:
    from services.algorithms.pefa.policy import SharePolicy

    return SharePolicy.parse(settings.share)


LISTINGS = (
    CatalogueItem(item_id="new-1", title="A new one", categories=("Chess", "Film")),
    CatalogueItem(item_id="3", title="Renamed", categories=("Robots",)),
    CatalogueItem(item_id="5", title="Withdrawn", withdrawn=True),
    CatalogueItem(item_id="7", title="Not available", available=False),
)


def answer(
    bundle_dir: Path, states: Mapping[str, Any], seen: Mapping[str, Sequence[str]], topics: Topics | None
) -> Any:
    """Top-10 lists: from the bundle, after the index deltas, after the listings; with and without votes."""
    found: dict[str, Any] = {}
    for name, votes in (("model", 0), ("votes", 4)):
        settings = CandidatesSettings(
            bundle=bundle_dir,
            port=0,
            metrics_port=0,
            algorithms="exact brute_force",
            audit_share=0,
            vote_neighbours=votes,
            vote_model_share=0.7 if votes else 1.0,
        )
        metrics = CandidatesMetrics(CollectorRegistry())
        live = make_live(settings, load_catalogue(settings), metrics)
        changes = CatalogueChanges(live.catalogue, metrics.catalogue, full_error=IndexFullError, remembered=live.votes)

        def lists(live: Any = live) -> Any:
            queries = [
                SearchQuery(
                    query=unpack_query_state(
                        bytes.fromhex(state["components"]),
                        bytes.fromhex(state["gate"]),
                        num_components=state["num_components"],
                        component_width=state["component_width"],
                    ),
                    model_version=live.catalogue.base.model_version,
                    k=10,
                    stage=Stage.FULL,
                    filter=ItemFilter(exclude_seen=True, seen_item_ids=seen[user]),
                )
                for user, state in states.items()
            ]
            answers = live.search.find_all(queries)
            return {
                "version": live.catalogue.served.name,
                "lists": {
                    user: {"item_ids": one.item_ids, "scores": one.scores}
                    for user, one in zip(states, answers, strict=True)
                },
            }

        found[name] = {"bundle": lists()}
        if topics is not None:
            batches = Batches()
            for record in topics.records[INDEX_DELTAS]:
                delta = decode(bytes.fromhex(record["key"]), bytes.fromhex(record["value"]))
                for batch in batches.add(record["offset"], delta):
                    assert changes.apply(batch, is_live=False)
            found[name]["deltas"] = lists()
            changes.describe(LISTINGS)
            found[name]["listings"] = lists()
        asyncio.run(live.search.close())
    return found


def main(out: Path) -> None:
    torch.set_num_threads(1)
    for name in ("refresher", "topics"):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
    data, later = training_data()
    write_interactions(out / "training_data.json", data)
    # Exporting takes minutes: what is there is kept.
    for name, config in (("mixture", CONFIG), ("dot", with_sasrec(DOT))):
        if not (out / name).exists():
            make_bundle(out / name, config, data)
    if not (out / "training").exists():
        make_training(out / "training", data)

    bundle, topics = load_bundle(out / "mixture"), Topics()
    stream = make_interactions(later, topics)
    users = sorted({(record.key or b"").decode() for log in stream.log for record in log}, key=int)
    with tempfile.TemporaryDirectory() as scratch:
        stack = Stack(Path(scratch), ports=Ports.free())
        stack.up(["redis"])
        try:
            client = redis.Redis.from_url(stack.redis_url)
            client.set(state_layout.EPOCH_KEY, EPOCH)
            store = StateWriter(stack.redis_url)
            how = encode_stream(bundle, stream, store, topics)
            dumped = {key.hex(): client.dump(key).hex() for key in sorted(client.keys("*"))}
            stored = asyncio.run(describe_store(stack.redis_url, users, bundle.model_version))
            stored["histories"] = describe_histories(store, users)
            dot_states = encode_dot(load_bundle(out / "dot"), stream, client, stack.redis_url, users)
            store.close()
        finally:
            stack.down()
    write(out / "redis.json", {"dump": dumped, "expected": stored, "how": how})
    for item in LISTINGS:
        topics.add(Record(ITEMS, item.item_id.encode(), encode_item(item)), NOW_MS, plain(item))
    refresh(bundle, out / "mixture", topics, out / "refresher")
    for name, records in topics.records.items():
        write(out / "topics" / f"{name}.json", records)

    states = {user: one["state"]["query_state"] for user, one in stored["users"].items() if one["state"]}
    assert len(states) >= 20, len(states)
    states = dict(list(states.items())[:20])
    seen = {user: stored["users"][user]["seen"] for user in stored["users"]}
    dot_states = {user: dot_states[user] for user in states if user in dot_states}
    write(
        out / "answers.json",
        {
            "seen": seen,
            "mixture": {"states": states, "answers": answer(out / "mixture", states, seen, topics)},
            "dot": {"states": dot_states, "answers": answer(out / "dot", dot_states, seen, None)},
        },
    )


def encode_dot(bundle: Bundle, stream: MemoryStream, client: Any, url: str, users: Sequence[str]) -> dict[str, Any]:
    """The same stream through the other bundle, into an emptied Redis that nobody keeps."""
    client.flushall()
    client.set(state_layout.EPOCH_KEY, EPOCH)
    store = StateWriter(url)
    encode_stream(bundle, stream, store, Topics())
    stored = asyncio.run(describe_store(url, users, bundle.model_version))["users"]
    store.close()
    return {user: one["state"]["query_state"] for user, one in stored.items() if one["state"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
