"""A partition's state to a checkpoint's bytes and back, whole or not at all.

The position lies beside what it stands for, so there is no moment at which one is newer than the other. Knows the
format (checkpoint.py) and the state, not the files.
"""

from array import array
from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.memory import QueryMemory
from services.algorithms.pefa.policy import SharePolicy
from services.algorithms.pefa.sums import ItemSums
from services.refresher.checkpoint import CheckpointError, pack, pack_text, unpack, unpack_text
from services.refresher.domain.ledger import Ledger
from services.refresher.domain.partition import Partition
from services.refresher.domain.pending import Pending
from services.refresher.domain.rules import Rules

_NEVER = -1


class OtherRulesError(CheckpointError):
    """A whole checkpoint that other rules made. items, entries: what readers may hold from it."""

    def __init__(self, message: str, items: list[str], entries: list[str]) -> None:
        super().__init__(message)
        self.items, self.entries = items, entries


def to_bytes(state: Partition) -> bytes:
    """A checkpoint of a state, with what is still to be published."""
    users = state.ledger.users()
    pending, pending_arrays = state.pending.to_arrays()
    contributor_items = sorted(state.contributor_hashes)
    published = sorted(state.published)
    dirty = sorted(state.dirty_items)
    flat = array("Q")
    for item_id in contributor_items:
        flat += state.contributor_hashes[item_id]
    arrays: dict[str, npt.NDArray[Any]] = {
        "users": pack_text(users),
        "takers.items": pack_text(contributor_items),
        "takers.lengths": np.array([len(state.contributor_hashes[item_id]) for item_id in contributor_items], np.int64),
        "takers.users": np.array(flat, np.uint64),
        "published.items": pack_text(published),
        "published.shares": np.array([state.published[item_id] for item_id in published], np.float64),
        "visible": pack_text(sorted(state.visible)),
        "dirty.items": pack_text(dirty),
        "dirty.removed": np.array([state.dirty_items[item_id] for item_id in dirty], np.uint8),
        "dirty.entries": pack_text(sorted(state.dirty_entries)),
        "parked.items": pack_text(pending),
    }
    groups: dict[str, Mapping[str, npt.NDArray[Any]]] = {
        "sums": state.sums.to_arrays(),
        "memory": state.memory.to_arrays(),
        "ledger": state.ledger.to_arrays(),
        "parked": pending_arrays,
    }
    for group, members in groups.items():
        arrays |= {f"{group}.{name}": values for name, values in members.items()}
    values = {
        "rules": state.rules.text,
        "partition": state.number,
        "folded_offset": state.folded_offset,
        "stream_ms": state.stream_ms,
        "newest_recorded_ms": _NEVER if state.newest_recorded_ms is None else state.newest_recorded_ms,
        "mark": state.mark,
        "new_share": state.new_item_policy.text,
        "counts": dict(state.counts),
        "other_models": dict(state.other_models),
        "quiet_until": state.quiet_until,
        "num_dirty_items": len(dirty),
        "num_dirty_entries": len(state.dirty_entries),
        "num_users": len(users),
        "num_takers": len(contributor_items),
        "num_published": len(published),
        "num_visible": len(state.visible),
        "num_parked": len(pending),
    }
    return pack(values, arrays)


def from_bytes(data: bytes, number: int, rules: Rules, listed: Container[str]) -> Partition:
    """The state that `to_bytes` saved.

    Raises: CheckpointError for bytes that are torn, altered or of another partition, OtherRulesError for other rules.
    """
    values, arrays = unpack(data)
    try:
        if values["partition"] != number:
            raise CheckpointError(f"it is of partition {values['partition']}, not {number}")
        published = unpack_text(arrays["published.items"], values["num_published"])
        visible = unpack_text(arrays["visible"], values["num_visible"])
        if values["rules"] != rules.text:
            raise OtherRulesError(f"made by {values['rules']!r}; these are {rules.text!r}", published, visible)
        state = Partition(number, rules, listed)
        state.folded_offset = values["folded_offset"]
        state.stream_ms = values["stream_ms"]
        if values["newest_recorded_ms"] != _NEVER:
            state.newest_recorded_ms = values["newest_recorded_ms"]
        state.mark = None if values["mark"] is None else (values["mark"][0], values["mark"][1])
        state.new_item_policy = SharePolicy.parse(values["new_share"])
        state.counts, state.other_models = Counter(values["counts"]), Counter(values["other_models"])
        state.sums = ItemSums.from_arrays(_group(arrays, "sums"), decay=rules.decay)
        state.memory = QueryMemory.from_arrays(_group(arrays, "memory"))
        state.show_memory()
        users = unpack_text(arrays["users"], values["num_users"])
        state.ledger = Ledger.from_arrays(users, _group(arrays, "ledger"))
        pending = unpack_text(arrays["parked.items"], values["num_parked"])
        state.pending = Pending.from_arrays(rules.max_pending, pending, _group(arrays, "parked"))
        start = 0
        contributor_items = unpack_text(arrays["takers.items"], values["num_takers"])
        for item_id, length in zip(contributor_items, arrays["takers.lengths"].tolist(), strict=True):
            state.contributor_hashes[item_id] = array("Q", arrays["takers.users"][start : start + length].tolist())
            start += length
        state.published = dict(zip(published, arrays["published.shares"].tolist(), strict=True))
        dirty = unpack_text(arrays["dirty.items"], values["num_dirty_items"])
        state.dirty_items = dict(zip(dirty, map(bool, arrays["dirty.removed"].tolist()), strict=True))
        state.dirty_entries = set(unpack_text(arrays["dirty.entries"], values["num_dirty_entries"]))
        state.quiet_until = values["quiet_until"]
    except (KeyError, ValueError, IndexError, UnicodeDecodeError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"whole, but not of this program's making: {exc}") from exc
    return state


def _group(arrays: Mapping[str, npt.NDArray[Any]], group: str) -> dict[str, npt.NDArray[Any]]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
