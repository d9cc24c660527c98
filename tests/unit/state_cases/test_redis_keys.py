"""What Redis holds: which keys one write touches, and who a user is after the pseudonym key was changed.

A real cluster is not needed for the first question: the keys that the real writer hands to its scripts are listed, and
their hash slots computed as Redis Cluster does.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fakes.encoder import MemoryForgetLog, MemoryStream
from redis.crc import key_slot
from refresher.refresher_scene import World, fold_all, interaction, make_rules
from state_scene import ANN, NOW_MS, EncoderProcess, FragileStore, append_all

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.retraction import ForgetUpTo
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.forgets import Forget
from services.refresher.domain.records import Forgetting
from services.user_state import layout as state_layout
from services.user_state.values import AdvanceStep, UserUpdate
from services.user_state.writer import StateWriter

# An epoch of a stream with one partition.
EPOCH = "epoch-1"


class RecordingRedis:
    """Takes every script's call; `calls` holds the keys of each."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self._queued = 0

    def script_load(self, script: str) -> str:
        return script

    def pipeline(self, *, transaction: bool) -> "RecordingRedis":
        return self

    def evalsha(self, sha: str, num_keys: int, *arguments: Any) -> None:
        self.calls.append([str(key) for key in arguments[:num_keys]])
        self._queued += 1

    def execute(self) -> list[int]:
        queued, self._queued = self._queued, 0
        return [1] * queued


def scripts_of_one_write(user_ids: Sequence[str]) -> list[list[str]]:
    """The keys of every script that one event of each of these users takes, the watermark included."""
    writer, recording = StateWriter("redis://localhost"), RecordingRedis()
    writer._redis = recording  # type: ignore[assignment]
    updates = [
        UserUpdate(
            user_id=user_id,
            model_version="m1",
            expected=b"",
            positions={0: offset},
            events=[StoredEvent(NOW_MS, 0, offset, 1, "a")],
            recent=[],
            seen_times={"a": NOW_MS},
        )
        for offset, user_id in enumerate(user_ids)
    ]
    writer.apply(updates, EPOCH, {0: -1})
    step = AdvanceStep(partition=0, from_watermark=-1, to_watermark=len(user_ids) - 1, counts={"applied": 1})
    writer.advance([step], EPOCH)
    return recording.calls


def test_the_keys_of_one_user_lie_in_one_hash_slot() -> None:
    update, _ = scripts_of_one_write([ANN])
    assert len({key_slot(key.encode()) for key in update}) == 1
    assert state_layout.history_key(state_layout.home_of(ANN, EPOCH)) in update


def test_every_user_lies_in_one_hash_slot_with_the_progress_that_covers_her() -> None:
    users = ["ann", "bob", "cid"]
    calls = scripts_of_one_write(users)
    updates, progress = calls[: len(users)], calls[len(users) :]
    covered = {key_slot(key.encode()) for keys in progress for key in keys}
    apart = [keys[0] for keys in updates if not covered & {key_slot(key.encode()) for key in keys}]
    assert apart == []


class NamingStore(FragileStore):
    """Which models it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.models: set[str] = set()

    def add_model(self, model_version: str) -> None:
        self.models.add(model_version)


def test_a_model_whose_name_alone_was_lost_is_named_again() -> None:
    """On a cluster the names lie on a node of their own: its failover moves no watermark."""
    stream, store = MemoryStream(1), NamingStore()
    append_all(stream, "ab")
    process = EncoderProcess(stream, store).settle()
    named = set(store.models)
    assert named
    store.models.clear()
    process.settle()
    assert store.models == named


def test_a_forget_after_the_pseudonym_key_was_changed_takes_the_users_sums_back() -> None:
    """The encoder process and the refresher are the real ones; the attribution is written here under the pseudonym of
    the old key, as an encoder process with that key wrote it."""
    old_key, new_key = b"old", b"new"
    world, stream, store, forgets = World(make_rules()), MemoryStream(1), FragileStore(), MemoryForgetLog()
    append_all(stream, "ab")
    EncoderProcess(stream, store, forget_log=forgets, pseudonym_key=old_key).settle()
    rng = np.random.default_rng(1)
    world.log.append(0, interaction(rng, place=(0, 1), item="item-1", user=pseudonym_of(ANN, old_key)))
    running = world.refresher()
    running.settle()
    forgets.append(Forget(forget_id="f", user_id=ANN, up_to={0: 1}, requested_ms=NOW_MS))
    process = EncoderProcess(stream, store, forget_log=forgets, pseudonym_key=new_key, earlier_keys=(old_key,)).settle()
    for voided in process.outbox.attributions:
        if isinstance(voided, ForgetUpTo):
            world.log.append(0, Forgetting(0, voided.user_pseudonym, voided.up_to))
    running.settle()
    state = running.held.partitions[0]
    assert (store.history(), sorted(state.sums), sorted(state.remembered.visible)) == ("", [], [])


def test_after_a_rekey_a_forget_under_the_new_key_alone_takes_everything_back() -> None:
    """`freshet backfill-attributions --rekey` writes every attribution once more under the new pseudonym: nothing is
    added to the sums, and what is there is the same user's. A new item, so that its contributors are looked at, too."""
    old, new = pseudonym_of(ANN, b"old"), pseudonym_of(ANN, b"new")
    world, rng = World(make_rules()), np.random.default_rng(1)
    world.log.put("new-item")
    items = ["item-1", "new-item"]
    given = [interaction(rng, place=(0, place), item=item, user=old) for place, item in enumerate(items)]
    for one in given:
        world.log.append(0, one)
    running = world.refresher()
    running.settle()
    state = running.held.partitions[0]
    before = state.sums.of(items).sums.tolist()
    for one in given:
        world.log.append(0, replace(one, user=new))
    running.settle()
    assert state.sums.of(items).sums.tolist() == before
    described = [running.describe.user(user) for user in (old, new, f"{new},{old}")]
    assert [(one.interactions, one.items) for one in described] == [(0, 0), (2, 2), (2, 2)]
    assert running.digests() == {0: fold_all(world.rules, world.log, listed={"new-item": False}).digest()}
    world.log.append(0, Forgetting(0, new, {0: 1}))
    running.settle()
    assert (sorted(state.sums), sorted(state.remembered.visible), state.contributor_hashes) == ([], [], {})
