"""A small model, random records of `attributions` in every kind, and a refresher over in-memory ports."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fakes.leases import LeaseTable, MemoryLeases
from fakes.refresher import MemoryCheckpoints, MemoryLog, MemoryOutbox
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.pefa.policy import DEFAULT_SHARE, SharePolicy
from services.algorithms.scoring.packed_state import pack_query_state
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.contracts.topics.index_deltas import Batches, IndexDelta, ItemDelta, MemoryDelta
from services.contracts.wire import PackedQueryState
from services.platform.stream.follower import TurnClock
from services.platform.stream.ports import Leases
from services.platform.stream.records import pack_position
from services.refresher.consumer import Refresher, RefresherLimits
from services.refresher.domain.partition import Partition, PartitionRegistry
from services.refresher.domain.records import Entry, Forgetting, Interaction, Undo
from services.refresher.domain.rules import ModelItems, Rules
from services.refresher.handlers.fold import FoldRecords
from services.refresher.handlers.publish import ContentStates, Publisher
from services.refresher.metrics import RefresherMetrics
from services.refresher.ports import Checkpoints, Log, Outbox
from services.refresher.server import Describe

MODEL = "model-a"
P_Q, P_X, D = 3, 2, 4
NUM_ITEMS = 12
START_MS = 1_700_000_000_000


def unit(array: np.ndarray) -> np.ndarray:
    return (array / np.linalg.norm(array, axis=-1, keepdims=True)).astype(np.float32)


def make_rules(
    *,
    seed: int = 0,
    max_remembered: int = 16,
    max_pending: int = 1000,
    leave_out: int | None = None,
) -> Rules:
    rng = np.random.default_rng(seed)
    pairs = P_Q * P_X
    gate = PairGate(
        hidden_weight=rng.normal(size=(8, pairs)).astype(np.float32),
        hidden_bias=rng.normal(size=8).astype(np.float32),
        out_weight=rng.normal(size=(pairs, 8)).astype(np.float32),
        out_bias=rng.normal(size=pairs).astype(np.float32),
    )
    states = ItemStates(
        components=unit(rng.normal(size=(NUM_ITEMS, P_X, D))),
        gate=rng.normal(size=(NUM_ITEMS, pairs)).astype(np.float32),
    )
    return Rules(
        items=ModelItems(
            model_version=MODEL,
            num_query_components=P_Q,
            states=states,
            index=ItemIds.of(f"item-{row}" for row in range(NUM_ITEMS)),
            pair_gate=gate,
            leave_out=leave_out,
        ),
        feedback=default_schema().feedback,
        max_remembered=max_remembered,
        max_pending=max_pending,
    )


def make_query(rng: np.random.Generator, model_version: str = MODEL) -> PackedQueryState:
    states = QueryStates(
        components=unit(rng.normal(size=(1, P_Q, D))), gate=rng.normal(size=(1, P_Q * P_X)).astype(np.float32)
    )
    components, gate = pack_query_state(states)
    return PackedQueryState(
        model_version=model_version, components=components, gate=gate, num_components=P_Q, component_width=D
    )


def interaction(
    rng: np.random.Generator,
    *,
    place: tuple[int, int],
    item: str,
    user: str,
    kind: str = "click",
    value: float = 0.0,
    model: str = MODEL,
    moment_ms: int = START_MS,
) -> Interaction:
    return Interaction(
        offset=0,
        source_position=pack_position(*place),
        item_id=item,
        user=user,
        query=make_query(rng, model),
        type=kind,
        value=value,
        moment_ms=moment_ms,
        recorded_ms=moment_ms,
    )


def random_records(seed: int, count: int, *, users: int = 8, new_items: int = 3) -> list[Entry]:
    """Records of one partition: interactions of users with items (some new), undos, forgets, duplicates, other models.

    A place is a user's own: partition u % 2, offsets that grow, now and then out of order.
    """
    rng = np.random.default_rng(seed)
    records: list[Entry] = []
    next_offset = [0, 0]
    made: list[Interaction] = []
    for number in range(count):
        user = int(rng.integers(users))
        partition = user % 2
        draw = rng.random()
        if draw < 0.06 and made:
            target = made[int(rng.integers(len(made)))]
            records.append(Undo(0, target.source_position, target.item_id, target.user))
        elif draw < 0.09:
            up_to = int(rng.integers(-1, next_offset[partition] + 3))
            records.append(Forgetting(0, f"user-{user}", {partition: up_to, 1 - partition: -1}))
        elif draw < 0.15 and made:
            records.append(made[int(rng.integers(len(made)))])
        else:
            next_offset[partition] += int(rng.integers(1, 3))
            late = int(rng.integers(0, 2))
            one = interaction(
                rng,
                place=(partition, next_offset[partition] * 2 - late),
                item=f"item-{int(rng.integers(NUM_ITEMS + new_items))}",
                user=f"user-{user}",
                kind="rating" if rng.random() < 0.5 else "click",
                value=float(rng.integers(1, 6)),
                model=MODEL if rng.random() < 0.95 else "model-b",
                moment_ms=START_MS + 1000 * number + int(rng.integers(-5000, 5000)),
            )
            records.append(one)
            if one.query.model_version == MODEL:
                made.append(one)
    return records


def survivors(records: Sequence[Entry]) -> list[Interaction]:
    """The interactions that count after all records, by the definition: no ledger, no order."""
    undone = {record.source_position for record in records if isinstance(record, Undo)}
    forgotten = [record for record in records if isinstance(record, Forgetting)]
    found: dict[int, Interaction] = {}
    for record in records:
        if (
            not isinstance(record, Interaction)
            or record.query.model_version != MODEL
            or record.source_position in undone
        ):
            continue
        partition, offset = record.source_position >> 48, record.source_position & ((1 << 48) - 1)
        if any(f.user == record.user and offset <= f.up_to.get(partition, -1) for f in forgotten):
            continue
        found.setdefault(record.source_position, record)
    return list(found.values())


def log_of(records: Sequence[Entry], **own: Any) -> MemoryLog:
    """A log of one partition with these records."""
    log = MemoryLog(**own)
    for record in records:
        log.append(0, record)
    return log


@dataclass
class World:
    """Everything outside a refresher, and those started in it."""

    rules: Rules
    log: MemoryLog = field(default_factory=MemoryLog)
    outbox: MemoryOutbox = field(default_factory=MemoryOutbox)
    checkpoints: MemoryCheckpoints = field(default_factory=MemoryCheckpoints)
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.table = LeaseTable(lambda: self.now_ms)

    def refresher(
        self,
        name: str = "a",
        *,
        log: Log | None = None,
        outbox: Outbox | None = None,
        checkpoints: Checkpoints | None = None,
        leases: Leases | None = None,
        share: SharePolicy = DEFAULT_SHARE,
        min_users: int = 1,
        max_changes: int = 2_000,
        checkpoint_s: float = 0.0,
        content: ContentStates | None = None,
        new_item_policy: SharePolicy | None = None,
        registry: CollectorRegistry | None = None,
        turns: TurnClock | None = None,
        on_stall: Callable[[], None] = lambda: None,
        keeper: Executor | None = None,
    ) -> "Running":
        held, withdrawn = PartitionRegistry(), dict[str, bool]()
        publisher = Publisher(
            weight_policy=share,
            min_users=min_users,
            withdrawn=withdrawn,
            content=content,
            new_item_policy=new_item_policy,
        )
        refresher = Refresher(
            log=log or self.log,
            outbox=outbox or self.outbox,
            checkpoints=checkpoints or self.checkpoints,
            leases=leases or MemoryLeases(self.table, name),
            rules=self.rules,
            publisher=publisher,
            withdrawn=withdrawn,
            registry=held,
            metrics=RefresherMetrics(registry or CollectorRegistry()),
            limits=RefresherLimits(
                publish_s=0.0, checkpoint_s=checkpoint_s, house_s=0.0, poll_ms=1, max_changes=max_changes
            ),
            on_stall=on_stall,
            turns=turns,
            keeper=keeper,
        )
        return Running(refresher, held, publisher, Describe(held, publisher, self.rules))

    def settled(self, name: str = "a", **own: Any) -> "Running":
        """A refresher that has folded and published everything."""
        running = self.refresher(name, **own)
        running.settle()
        return running


@dataclass
class Running:
    refresher: Refresher
    held: PartitionRegistry
    publisher: Publisher
    describe: Describe

    def settle(self, seconds: float = 60.0) -> None:
        """Step until nothing is folded or left to publish any more; publications pause by the clock."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            folded = self.refresher.step()
            states = self.held.partitions.values()
            if not folded and not any(state.outgoing.num_changes for state in states):
                return
        raise AssertionError("it does not settle")

    def digests(self) -> dict[int, str]:
        return {number: state.digest() for number, state in sorted(self.held.partitions.items())}


def fold_all(
    rules: Rules, log: MemoryLog, partition: int = 0, *, listed: Mapping[str, bool] | None = None
) -> Partition:
    """The whole log of one partition in one piece."""
    state = Partition(partition, rules, {} if listed is None else listed)
    fold = FoldRecords(log)
    fold.fold(state, log.entries[partition])
    while state.leaving or state.returning:
        fold.go_on(state)
    return state


def contributors_of(state: Partition) -> dict[str, list[int]]:
    """Who stands behind each item's sums, as hashes of users, from the ledger."""
    found = {}
    for number, item_id in enumerate(state.numbers.ids):
        rows = state.ledger.of_item(number)
        if len(rows["users"]):
            found[item_id] = sorted(rows["users"].tolist())
            if state.rules.items.row(item_id) < 0:
                assert sorted(state.contributor_hashes[item_id]) == found[item_id]
    assert found.keys() == set(state.sums)
    return found


def readers_view(deltas: Sequence[IndexDelta]) -> tuple[dict[str, ItemDelta], dict[str, MemoryDelta]]:
    """What a reader of the topic holds after these records: items and memory entries, dropped ones gone."""
    batches = Batches()
    items: dict[str, ItemDelta] = {}
    entries: dict[str, MemoryDelta] = {}
    for offset, delta in enumerate(deltas):
        for batch in batches.add(offset, delta):
            for one in batch.deltas:
                change = one.change
                if isinstance(change, ItemDelta):
                    items[change.item_id] = change
                else:
                    entries[change.entry_id] = change
    return (
        {item_id: change for item_id, change in items.items() if not change.dropped},
        {entry_id: change for entry_id, change in entries.items() if not change.dropped},
    )
