"""What Redis holds: models by name, and who a user is after the pseudonym key was changed."""

from dataclasses import replace

import numpy as np
from fakes.encoder import MemoryForgetLog, MemoryStream
from refresher.refresher_scene import World, fold_all, interaction, make_rules
from state_scene import ANN, NOW_MS, EncoderProcess, FragileStore, append_all

from services.contracts.pseudonyms import pseudonym_of
from services.contracts.topics.attributions import ForgetUpTo
from services.contracts.topics.forgets import Forget
from services.refresher.domain.records import Forgetting


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
    running = world.settled()
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
    running = world.settled()
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
