"""The gateway's adapters on shards and on one process, asked the same: what differs, and what is promised."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.packed_state import pack_query_state
from services.algorithms.scoring.states import QueryStates
from services.contracts.processes import PROCESSES
from services.contracts.shards import Shard
from services.contracts.topics.index_deltas import INDEX_DELTAS, IndexDelta, ItemDelta, encode
from services.contracts.wire import PackedQueryState
from services.gateway.adapters.processes import Remote, RemoteCandidates
from services.gateway.adapters.shards import ShardedCandidates
from services.gateway.domain import Pool, Ranking, Seen
from services.platform.rpc import client as rpc_client
from services.platform.stream.kafka import BulkProducer, Record
from services.stack import Stack

_CONCURRENT = 8
_TIMEOUT_S = 10.0
_SEEN = 50
_SIZES = (10, 100)
# Of changed items in a batch, and seconds between two batches.
_CHANGED, _EVERY_S = 20, 0.5
# Until shards and the one process have the same version, which changes twice a second.
_SAME_WITHIN_S = 30.0


@dataclass(slots=True)
class Found:
    """Of the answers that were of one version. different: their contents were not equal."""

    compared: int = 0
    different: int = 0
    versions: set[str] = field(default_factory=set)
    not_of_one_version: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Of one algorithm's pools and answers: recall of the true top 10, pools' sizes, and promises with those broken.

    complete: those with every allowed item. unproven: complete ones without a promise.
    """

    algorithm: str
    recall_whole: float
    recall_sharded: float
    pool_whole: float
    pool_sharded: float
    complete: int
    unproven: int
    promises: int
    broken: int


@asynccontextmanager
async def connected(stack: Stack, whole: Stack) -> Any:
    """(sharded, whole): the gateway's own adapters on both."""
    service = PROCESSES["candidates"].health_service

    def peer(address: str) -> Remote:
        return Remote(rpc_client.channel(address, shares=False, service=service))

    by_shard: dict[int, list[str]] = {}
    for name, one in stack.shard_stacks():
        by_shard.setdefault(int(name.partition("-")[0]), []).append(one.address("candidates"))
    peers = [peer(",".join(addresses)) for _, addresses in sorted(by_shard.items())]
    alone = peer(whole.address("candidates"))
    shards = [RemoteCandidates(one, Shard(number, len(peers))) for number, one in enumerate(peers)]
    yield ShardedCandidates(shards, patient_s=_TIMEOUT_S), RemoteCandidates(alone)
    await asyncio.gather(*(one.close() for one in (*peers, alone)))


def states_of(bundle: Bundle, queries: QueryStates) -> list[PackedQueryState]:
    """Query states as they cross the wire."""
    packed = [pack_query_state(queries, query) for query in range(len(queries))]
    return [
        PackedQueryState(
            model_version=bundle.model_version,
            components=components,
            gate=gate,
            num_components=queries.components.shape[1],
            component_width=queries.components.shape[2],
        )
        for components, gate in packed
    ]


def requests(bundle: Bundle, rng: np.random.Generator) -> list[dict[str, Any]]:
    """A search of every kind: seen items left out or not, a denied item, one category, few allowed items."""
    seen = rng.choice(bundle.item_ids, _SEEN, replace=False).tolist()
    categories = [one[0] for one in bundle.categories if one]
    filters = [
        ItemFilter(exclude_seen=False),
        ItemFilter(),
        ItemFilter(deny_item_ids=tuple(seen[:5])),
        ItemFilter(allow_categories=(categories[int(rng.integers(len(categories)))],)),
        ItemFilter(exclude_seen=False, allow_item_ids=tuple(seen)),
    ]
    return [{"filter": one, "seen": Seen(seen), "timeout_s": _TIMEOUT_S} for one in filters]


@contextmanager
def changing(stack: Stack, bundle: Bundle, seed: int) -> Iterator[None]:
    """States of some items change twice a second while the block runs; some are new, some dropped."""
    stop = Event()
    thread = Thread(target=_change, args=(stack, bundle, seed, stop), name="changes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _change(stack: Stack, bundle: Bundle, seed: int, stop: Event) -> None:
    rng, producer = np.random.default_rng(seed), BulkProducer(stack.kafka_bootstrap, client_id="freshet-bench-shards")
    states = bundle.item_states
    batch = 0
    while not stop.wait(_EVERY_S):
        batch += 1
        rows = rng.choice(bundle.num_items, _CHANGED, replace=False)
        ids = [bundle.item_ids[row] for row in rows]
        ids[0] = f"new-{seed}-{batch}"
        records = []
        for place, (row, item_id) in enumerate(zip(rows.tolist(), ids, strict=True)):
            components = states.components[row] + 0.3 * rng.standard_normal(states.components.shape[1:])
            components /= np.linalg.norm(components, axis=-1, keepdims=True)
            changed = ItemDelta(
                item_id=item_id,
                components=components.astype(np.float32),
                gate=None if states.gate is None else states.gate[row],
                model_share=0.0 if place == 0 else 0.5,
                num_interactions=3,
            )
            delta = IndexDelta(
                model_version=bundle.model_version,
                partition=1_000,  # no refresher's
                offset=batch * _CHANGED + place,
                batch=batch,
                last_of_batch=place == _CHANGED - 1,
                newest_recorded_ms=time.time_ns() // 1_000_000,
                change=ItemDelta(item_id=item_id, dropped=True) if place == 1 else changed,
            )
            records.append(Record(INDEX_DELTAS, delta.key, encode(delta)))
        producer.send_many(records)
    producer.close()


def content(one: Ranking) -> tuple[Any, ...]:
    """What an answer says but for its times, every bit of it."""
    items = [(item.item_id, float(item.score).hex()) for item in one.items]
    return items, repr(one.certificate.gap), one.index_version, one.num_items


async def compare(
    sharded: ShardedCandidates,
    whole: RemoteCandidates,
    bundle: Bundle,
    states: Sequence[PackedQueryState],
    *,
    searches: int,
    seed: int,
) -> Found:
    """Full searches, each of both at once; those of two versions are asked again."""
    found = Found()

    async def ask(worker: int, count: int) -> None:
        rng = np.random.default_rng((seed, worker))
        for _ in range(count):
            state = states[int(rng.integers(len(states)))]
            kinds = requests(bundle, rng)
            request = kinds[int(rng.integers(len(kinds)))] | {"k": int(rng.choice(_SIZES))}
            until = time.monotonic() + _SAME_WITHIN_S
            while True:
                one, other = await asyncio.gather(sharded.search(state, **request), whole.search(state, **request))
                if one.index_version == other.index_version or time.monotonic() > until:
                    break
                found.not_of_one_version += 1
            found.compared += 1
            found.versions.add(one.index_version)
            if content(one) != content(other):
                found.different += 1
                found.examples.append(f"{request['filter']} k={request['k']}: {content(one)} {content(other)}"[:2_000])

    await asyncio.gather(*(ask(worker, searches // _CONCURRENT) for worker in range(_CONCURRENT)))
    return found


async def promises(
    sharded: ShardedCandidates,
    whole: RemoteCandidates,
    truth: RemoteCandidates,
    bundle: Bundle,
    states: Sequence[PackedQueryState],
    *,
    algorithm: str,
    pool_size: int,
    seed: int,
) -> Promises:
    """Pools and answers of both to a search of every kind while nothing changes, against `truth`, which is exact."""
    rng = np.random.default_rng(seed)
    recalls: dict[str, list[float]] = {"whole": [], "sharded": []}
    sizes: dict[str, list[int]] = {"whole": [], "sharded": []}
    complete = unproven = made = broken = 0
    for request in requests(bundle, rng):
        state = states[int(rng.integers(len(states)))]
        true: Ranking = await truth.search(state, k=1_000, **request)
        order = {item.item_id: item.score for item in true.items}
        for name, candidates in (("whole", whole), ("sharded", sharded)):
            pool: Pool = await candidates.propose(state, k=pool_size, **request)
            full: Ranking = await candidates.search(state, k=100, **request)
            best, gap = list(order)[:10], full.certificate.gap
            recalls[name].append(len(set(best) & set(pool.item_ids)) / max(1, len(best)))
            sizes[name].append(len(pool.item_ids))
            answers = [
                (set(pool.item_ids), pool.bound),
                ({item.item_id for item in full.items}, None if gap is None else full.items[-1].score + gap),
            ]
            for there, bound in answers:
                left_out = [score for one, score in order.items() if one not in there]
                complete += not left_out
                unproven += not left_out and bound is None
                if bound is not None:
                    made += 1
                    broken += max(left_out, default=-np.inf) > bound
    return Promises(
        algorithm=algorithm,
        recall_whole=float(np.mean(recalls["whole"])),
        recall_sharded=float(np.mean(recalls["sharded"])),
        pool_whole=float(np.mean(sizes["whole"])),
        pool_sharded=float(np.mean(sizes["sharded"])),
        complete=complete,
        unproven=unproven,
        promises=made,
        broken=broken,
    )
