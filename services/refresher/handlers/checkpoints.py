"""Convert a partition's state to a checkpoint's parts and back, completely or not at all.

A part (a block of the ledger, the sums of some items, some entries of the memory) is written only if it changed. It is
captured under the lock, without large copies (`Ledger.share`), and encoded without the lock.
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.memory import MemoryEntry, QueryMemory, arrays_of, entries_of_arrays
from services.algorithms.pefa.policy import SharePolicy
from services.platform.stream.records import MAX_OFFSET
from services.refresher.checkpoint import (
    FORMAT,
    MALFORMED,
    CheckpointError,
    check_format,
    pack_text,
    squeeze,
    unpack_text,
    unsqueeze,
)
from services.refresher.domain.ledger import FORGOTTEN_SHARDS, NO_ITEM, UNDONE_CHUNK, Ledger
from services.refresher.domain.partition import SHARD_ITEMS, Partition
from services.refresher.domain.pending import Pending
from services.refresher.domain.rules import Rules

Rows = Mapping[str, npt.NDArray[Any]]
Versions = Mapping[str, object]

_NEVER = -1
_SOURCE_SHIFT = MAX_OFFSET.bit_length()
_IDS_CHUNK = 4096
_MEMORY_BUCKETS = 64


class OtherRulesError(CheckpointError):
    """A complete checkpoint has other rules. `items` and `entries` are what its partition has published."""

    def __init__(self, message: str, items: list[str], entries: list[str]) -> None:
        super().__init__(message)
        self.items, self.entries = items, entries


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state at one position. `versions` has each part's version, and `changed` an encoder for each changed part."""

    folded_offset: int
    values: dict[str, Any]
    versions: Versions
    changed: Mapping[str, Callable[[], bytes]]

    def parts(self) -> dict[str, bytes | None]:
        """Return every part, or None for an unchanged part, slowly and without the lock."""
        return {name: self.changed[name]() if name in self.changed else None for name in self.versions}


def versions(state: Partition) -> dict[str, object]:
    """Return a version of every part. Equal versions mean equal content; a part with None is always written."""
    for item_id in (*state.outgoing.published, *state.outgoing.dirty_items):
        state.numbers.get(item_id)
    ledger = state.ledger
    found: dict[str, object] = {f"rows/{number}": block.version for number, block in enumerate(ledger.blocks)}
    found |= {f"sums/{shard}": version for shard, version in enumerate(state.numbers.shard_versions) if version}
    found |= {
        f"ids/{start // _IDS_CHUNK}": min(_IDS_CHUNK, len(state.numbers.ids) - start)
        for start in range(0, len(state.numbers.ids), _IDS_CHUNK)
    }
    found |= {
        f"undone/{start // UNDONE_CHUNK}": min(UNDONE_CHUNK, len(ledger.undone) - start)
        for start in range(0, len(ledger.undone), UNDONE_CHUNK)
    }
    found |= {f"forgotten/{shard}": version for shard, version in enumerate(ledger.forgotten_versions) if version}
    found |= {f"memory/{bucket}": tuple(entries) for bucket, entries in _buckets(state.remembered.memory).items()}
    return found | {"rest": None}


def _buckets(memory: QueryMemory) -> dict[int, dict[str, MemoryEntry]]:
    buckets: dict[int, dict[str, MemoryEntry]] = {}
    for number, entry in memory.held():
        buckets.setdefault(number % _MEMORY_BUCKETS, {})[entry.entry_id] = entry
    return buckets


def snapshot(state: Partition, saved: Versions) -> Snapshot:
    """Capture a checkpoint with its unpublished changes. `saved` are the versions of stored parts."""
    found = versions(state)
    ledger, memory = state.ledger, state.remembered.memory
    values = {
        "format": FORMAT,
        "rules": state.rules.text,
        "partition": state.number,
        "folded_offset": state.folded_offset,
        "newest_recorded_ms": _NEVER if state.newest_recorded_ms is None else state.newest_recorded_ms,
        "mark": state.mark,
        "new_share": state.new_item_policy.text,
        "counts": dict(state.counts),
        "other_models": dict(state.other_models),
        "quiet_until": state.outgoing.quiet_until,
        "num_items": len(state.numbers.ids),
        "mix": ledger.mix(),
        "newest": list(ledger.newest.items()),
        "memory": [memory.capacity, memory.reserve, memory.bound],
        "leaving": {user: list(up_to.items()) for user, up_to in state.leaving.items()},
    }
    buckets = _buckets(memory)
    changed = {
        name: _maker(state, buckets, *name.partition("/")[::2])
        for name, version in found.items()
        if version is None or saved.get(name) != version
    }
    return Snapshot(state.folded_offset, values, found, changed)


def restore(
    values: Mapping[str, Any], parts: Mapping[str, bytes], number: int, rules: Rules, listed: Container[str]
) -> Partition:
    """The state of this snapshot.

    Raises: CheckpointError for a defect or another partition, OtherRulesError for other rules.
    """
    try:
        check_format(values)
        return _restore(values, parts, number, rules, listed)
    except MALFORMED as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"intact, but not written by this program: {exc!r}") from exc


def _maker(
    state: Partition, buckets: Mapping[int, Mapping[str, MemoryEntry]], kind: str, which: str
) -> Callable[[], bytes]:
    at = int(which or 0)
    ledger = state.ledger
    match kind:
        case "rows":
            rows = ledger.share(at)
            return lambda: _encode_rows(rows)
        case "sums":
            numbers = range(at * SHARD_ITEMS, min(len(state.numbers.ids), (at + 1) * SHARD_ITEMS))
            with_sums = [number for number in numbers if state.numbers.ids[number] in state.sums]
            sums = state.sums.pick([state.numbers.ids[number] for number in with_sums])
            return lambda: squeeze({"numbers": np.array(with_sums, np.int64), **sums})
        case "ids":
            ids = state.numbers.ids[at * _IDS_CHUNK : (at + 1) * _IDS_CHUNK]
            return lambda: squeeze({"ids": pack_text(ids)})
        case "undone":
            undone = ledger.undone[at * UNDONE_CHUNK : (at + 1) * UNDONE_CHUNK]
            return lambda: squeeze({"undone": np.array(undone, np.int64)})
        case "forgotten":
            users = ledger.forgotten(at)
            return lambda: json.dumps({user: list(up_to.items()) for user, up_to in users.items()}).encode()
        case "memory":
            entries = list(buckets[at].values())
            sizes = (state.remembered.memory.num_components, state.remembered.memory.width)
            return lambda: squeeze(arrays_of(entries, *sizes))
    pending, pending_arrays = state.pending.to_arrays()
    numbers_of = state.numbers.of
    rest: dict[str, npt.NDArray[Any]] = {
        "published": np.array([numbers_of[item_id] for item_id in state.outgoing.published], np.int64),
        "dirty": np.array([numbers_of[item_id] for item_id in state.outgoing.dirty_items], np.int64),
        "dirty.removed": np.array(list(state.outgoing.dirty_items.values()), np.uint8),
        "dirty.entries": pack_text(sorted(state.outgoing.dirty_entries)),
        "dirty.num_entries": np.array([len(state.outgoing.dirty_entries)], np.int64),
        "returning": np.array(state.returning, np.int64),
        "pending": pack_text(pending),
        "pending.num_items": np.array([len(pending)], np.int64),
        **pending_arrays,
    }
    return lambda: squeeze(rest)


def _encode_rows(rows: Rows) -> bytes:
    positions = rows["positions"]
    alive = positions >= 0
    at = positions & MAX_OFFSET
    return squeeze(
        {
            "users": rows["users"],
            "sources": np.where(alive, positions >> _SOURCE_SHIFT, _NEVER),
            "at": np.where(alive, at, at[alive].min(initial=MAX_OFFSET)),
            "offsets": rows["offsets"],
            "items": np.where(rows["items"] == NO_ITEM, -1, rows["items"].astype(np.int64)),
        }
    )


def _decode_rows(data: bytes) -> Rows:
    found = unsqueeze(data)
    sources, at = found.pop("sources"), found.pop("at")
    sources <<= _SOURCE_SHIFT
    found["positions"] = np.where(sources < 0, _NEVER, sources | at)
    found["items"] = found["items"].astype(np.uint32)
    return found


def _restore(
    values: Mapping[str, Any], parts: Mapping[str, bytes], number: int, rules: Rules, listed: Container[str]
) -> Partition:
    state = _fitting(values, number, rules, listed)
    kinds: dict[str, dict[int, bytes]] = {}
    for name, data in parts.items():
        kind, _, which = name.partition("/")
        kinds.setdefault(kind, {})[int(which or 0)] = data
    of_kind = {kind: [data for _, data in sorted(found.items())] for kind, found in kinds.items()}
    for chunk, data in enumerate(of_kind.get("ids", [])):
        count = min(_IDS_CHUNK, values["num_items"] - chunk * _IDS_CHUNK)
        for item_id in unpack_text(unsqueeze(data)["ids"], count):
            state.numbers.get(item_id)
    if len(state.numbers.ids) != values["num_items"]:
        raise CheckpointError(f"it holds {len(state.numbers.ids)} items of {values['num_items']}")
    capacity, reserve, bound = values["memory"]
    if type(capacity) is not int or type(reserve) is not int or type(bound) not in (int, NoneType):
        raise CheckpointError(f"memory={values['memory']!r:.80}; allowed: capacity, reserve, and a bound or null")
    memory = state.remembered.memory
    state.remembered.replace(
        QueryMemory.restored(
            (entry for data in of_kind.get("memory", []) for entry in entries_of_arrays(unsqueeze(data))),
            capacity=capacity,
            reserve=reserve,
            num_components=memory.num_components,
            width=memory.width,
            bound=bound,
        )
    )
    rest = unsqueeze(parts["rest"])
    published = [state.numbers.ids[row] for row in rest["published"].tolist()]
    if values["rules"] != rules.text:
        entries = list(state.remembered.visible)
        raise OtherRulesError(f"made with rules {values['rules']!r}; allowed: {rules.text!r}", published, entries)
    for shard, data in sorted(kinds.get("sums", {}).items()):
        arrays = unsqueeze(data)
        state.sums.put([state.numbers.ids[row] for row in arrays["numbers"].tolist()], arrays)
        state.numbers.shard_versions[shard] = 1
    shards = [
        {
            user: dict(map(tuple, up_to))
            for user, up_to in json.loads(kinds.get("forgotten", {}).get(shard, b"{}")).items()
        }
        for shard in range(FORGOTTEN_SHARDS)
    ]
    undone = [unsqueeze(data)["undone"] for data in of_kind.get("undone", [])]
    if len(values["mix"]) != 2 or any(type(word) is not int for word in values["mix"]):
        raise CheckpointError(f"mix={values['mix']!r:.80}; allowed: two whole numbers")
    state.ledger = Ledger.restored(
        [_decode_rows(data) for data in of_kind.get("rows", [])],
        np.concatenate([np.zeros(0, np.int64), *undone]),
        shards,
        values["mix"],
        dict(map(tuple, values["newest"])),
    )
    state.leaving = {user: dict(map(tuple, up_to)) for user, up_to in values["leaving"].items()}
    _find_contributors(state)
    state.outgoing.published = dict.fromkeys(published)
    dirty = [state.numbers.ids[row] for row in rest["dirty"].tolist()]
    state.outgoing.dirty_items = dict(zip(dirty, map(bool, rest["dirty.removed"].tolist()), strict=True))
    state.outgoing.dirty_entries = set(unpack_text(rest["dirty.entries"], int(rest["dirty.num_entries"][0])))
    state.returning = rest["returning"].tolist()
    pending = unpack_text(rest["pending"], int(rest["pending.num_items"][0]))
    state.pending = Pending.from_arrays(rules.max_pending, pending, rest)
    return state


def _fitting(values: Mapping[str, Any], number: int, rules: Rules, listed: Container[str]) -> Partition:
    if values["partition"] != number:
        raise CheckpointError(f"it is of partition {values['partition']}, not {number}")
    for name in ("folded_offset", "newest_recorded_ms", "quiet_until"):
        if type(values[name]) is not int:
            raise CheckpointError(f"{name}={values[name]!r:.80}; allowed: a whole number")
    for name in ("counts", "other_models"):
        if any(type(count) is not int for count in values[name].values()):
            raise CheckpointError(f"{name}={values[name]!r:.80}; allowed: whole numbers by name")
    state = Partition(number, rules, listed)
    state.folded_offset = values["folded_offset"]
    if values["newest_recorded_ms"] != _NEVER:
        state.newest_recorded_ms = values["newest_recorded_ms"]
    state.mark = None if values["mark"] is None else (values["mark"][0], values["mark"][1])
    state.new_item_policy = SharePolicy.parse(values["new_share"])
    state.counts, state.other_models = Counter(values["counts"]), Counter(values["other_models"])
    state.outgoing.quiet_until = values["quiet_until"]
    return state


def _find_contributors(state: Partition) -> None:
    new = [
        number
        for number, item_id in enumerate(state.numbers.ids)
        if item_id in state.sums and state.rules.items.is_new(item_id)
    ]
    if not new:
        return
    for block in state.ledger.blocks:
        items, users = block.items[: block.count], block.users[: block.count]
        rows = np.flatnonzero(np.isin(items, new))
        for item, user in zip(items[rows].tolist(), users[rows].tolist(), strict=True):
            state.contributor_hashes.setdefault(state.numbers.ids[item], array("Q")).append(user)
