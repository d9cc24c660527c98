"""What a user takes in a real Redis, and how long the records and messages of an event and an answer are.

Ids are of the length that clients use: `user-00000001`, `synthetic-00000001`, a UUID for an event.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import redis
from freshet.v1 import candidates_pb2

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.scoring.packed_state import pack_query_state
from services.contracts.query_state import PackedQueryState, to_message
from services.contracts.stored_history import RecentId, StoredEvent, pack_history
from services.contracts.topics.attributions import Attribution, encode_attribution
from services.contracts.topics.exposures import Exposure, encode_exposure
from services.contracts.topics.histories import encode_history
from services.contracts.topics.index_deltas import IndexDelta, ItemDelta, encode
from services.contracts.topics.interactions import Interaction, encode_interaction
from services.offline.evaluation.large.catalogue import queries
from services.platform.stream.topic import NUM_PARTITIONS
from services.stack import Ports, Stack
from services.user_state.reader import StateReader
from services.user_state.values import StoredState, UserUpdate
from services.user_state.writer import StateWriter

# Events in the history, seen items; the first is what `freshet plan` takes a user for.
USERS = ((100, 100), (20, 20), (100, 1_000))
_RECENT, _AT_ONCE, _K = 128, 100, 10
_NOW_MS = 1_700_000_000_000


def user_bytes(trained: Bundle, num_users: int) -> list[dict[str, Any]]:
    """Bytes of Redis's memory per user, and on the wire for a write and for what a recommendation reads."""
    rows = []
    with TemporaryDirectory() as name:
        stack = Stack(Path(name), ports=Ports.free())
        stack.up(["redis"])
        try:
            for num_events, num_seen in USERS:
                with redis.Redis.from_url(stack.redis_url) as client:
                    client.flushall()
                    rows.append({"events": num_events, "seen": num_seen, "plan": (num_events, num_seen) == USERS[0]})
                    rows[-1] |= _stored(client, stack.redis_url, trained, num_users, num_events, num_seen)
        finally:
            stack.down()
    return rows


def _stored(
    client: "redis.Redis", url: str, trained: Bundle, num_users: int, num_events: int, num_seen: int
) -> dict[str, int]:
    writer, reader = StateWriter(url, timeout_s=10), StateReader(url, timeout_s=10)
    state = _state(trained)
    epoch, _ = writer.ensure_epoch(NUM_PARTITIONS)
    users = [f"user-{number:08d}" for number in range(num_users)]
    updates = [_update(user, state, num_events, num_seen) for user in users]

    async def read() -> None:
        for user in users:
            await reader.read_user(user, state.model_version)
        await reader.close()

    memory, net = _used(client)
    for start in range(0, num_users, _AT_ONCE):
        writer.apply(updates[start : start + _AT_ONCE], epoch, {})
    memory_then, net_then = _used(client)
    asyncio.run(read())
    _, net_read = _used(client)
    writer.close()
    grown = {"memory": memory_then - memory, "written": net_then - net, "read": net_read - net_then}
    return {name: round(value / num_users) for name, value in grown.items()}


def _used(client: "redis.Redis") -> tuple[int, int]:
    about: Mapping[str, Any] = client.info()
    return int(about["used_memory"]), int(about["total_net_input_bytes"]) + int(about["total_net_output_bytes"])


def _update(user: str, state: PackedQueryState, num_events: int, num_seen: int) -> UserUpdate:
    events, recent = _history(num_events)
    return UserUpdate(
        user_id=user,
        model_version=state.model_version,
        expected=b"",
        positions={3: 1_000_000},
        events=events,
        recent=recent,
        seen_times={_item(number): _NOW_MS + 60_000 * number for number in range(num_seen)},
        state=StoredState(query_state=state, partition=3, offset=1_000_000, event_time_ms=_NOW_MS, applied_ms=_NOW_MS),
        state_change="set",
    )


def _history(num_events: int) -> tuple[list[StoredEvent], list[RecentId]]:
    def id_hash(number: int) -> int:
        return number * 0x9E3779B97F4A7C15 % 2**63

    events = [
        StoredEvent(_NOW_MS + 60_000 * n, 3, 1_000 * n, id_hash(n), _item(n), "rating", 4.0) for n in range(num_events)
    ]
    recent = [RecentId(id_hash(n), 3, 1_000 * n, 0, _item(n)) for n in range(min(num_events, _RECENT))]
    return events, recent


def record_bytes(trained: Bundle) -> list[dict[str, Any]]:
    """Key and value of a record of each topic; a Search of candidates and its answer. Without framing."""
    state, event_id = _state(trained), str(UUID(int=2**127 + 1))
    interaction = Interaction(
        user_id="user-00000001", item_id=_item(1), event_id=event_id, type="rating", value=4.0, event_time_ms=_NOW_MS
    )
    attribution = Attribution(
        event_id=event_id, item_id=_item(1), event_time_ms=_NOW_MS, recorded_ms=_NOW_MS, partition=3, offset=1_000_000,
        user_pseudonym="0" * 32, state=state, type="rating", value=4.0,
    )  # fmt: skip
    gate = trained.item_states.gate
    delta = IndexDelta(
        model_version=state.model_version, partition=3, offset=1_000_000, batch=1_000, last_of_batch=False,
        newest_recorded_ms=_NOW_MS,
        change=ItemDelta(
            item_id=_item(1), components=trained.item_states.components[0], gate=None if gate is None else gate[0],
            model_share=0.9, num_interactions=100,
        ),
    )  # fmt: skip
    items = [_item(number) for number in range(_K)]
    exposure = Exposure(
        exposure_id=event_id, shown_ms=_NOW_MS, surface="recommend", model_version=state.model_version,
        index_version=state.model_version, item_ids=items, scores=[0.5] * _K, sources=["model"] * _K,
    )  # fmt: skip
    events, recent = _history(USERS[0][0])
    seen = {_item(number): _NOW_MS for number in range(USERS[0][1])}
    history = encode_history("user-00000001", pack_history({3: 1_000_000}, {}, events, recent, seen), 1)
    search = candidates_pb2.SearchRequest(
        query_state=to_message(state), k=_K, stage=candidates_pb2.STAGE_FULL, seen_item_ids=list(seen)
    )
    search.filter.exclude_seen = True
    answer = candidates_pb2.SearchResponse(
        item_ids=items, scores=[0.5] * _K, votes=[0.5] * _K, model_version=state.model_version,
        index_version=state.model_version, algorithm="quantized_tangents(2000)",
    )  # fmt: skip
    lengths = {
        "interaction": len("user-00000001") + len(encode_interaction(interaction)),
        "attribution": len(_item(1)) + len(encode_attribution(attribution)),
        "item delta": len(delta.key) + len(encode(delta)),
        "history": len("user-00000001") + len(history),
        "exposure": 32 + len(encode_exposure(exposure)),
        "search": search.ByteSize() + answer.ByteSize(),
    }
    return [{"what": what, "bytes": length} for what, length in lengths.items()]


def _state(trained: Bundle) -> PackedQueryState:
    asked = queries(trained, 1, seed=0)
    components, gate = pack_query_state(asked)
    _, num_components, width = asked.components.shape
    return PackedQueryState(
        model_version=trained.model_version,
        components=components,
        gate=gate,
        num_components=num_components,
        component_width=width,
    )


def _item(number: int) -> str:
    return f"synthetic-{number:08d}"
