"""A new item is as long as the bundle says of its model, and so found, on a stack that has seen nothing else yet."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refresher_scene import NUM_ITEMS, D, World, interaction, make_rules, readers_view, unit

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.policy import SharePolicy
from services.algorithms.scoring.packed_state import pack_query_state
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.contracts.wire import PackedQueryState
from services.offline.bundles.model import write_bundle
from services.refresher.bootstrap import new_item_policy
from services.refresher.config import RefresherSettings
from services.refresher.domain.rules import ModelItems, Rules
from tests.unit.bundle.bundle_scene import content


def share_from(tmp_path: Path, length: float | None) -> SharePolicy | None:
    write_bundle(tmp_path / "bundle", replace(content(), new_item_length=length))
    return new_item_policy(RefresherSettings(), load_bundle(tmp_path / "bundle"))


def test_the_setting_comes_first_then_the_bundle_and_an_older_bundle_leaves_it_to_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = share_from(tmp_path, 0.9)
    assert told is not None
    assert told.least == pytest.approx(0.1)
    assert share_from(tmp_path, None) is None
    monkeypatch.setenv("FRESHET_REFRESHER_NEW_ITEM_SHARE", "fixed(least=0.7)")
    assert share_from(tmp_path, 0.9) == SharePolicy(kind="fixed", least=0.7)


def test_after_three_interactions_a_new_item_is_found_by_people_like_those_who_took_it(tmp_path: Path) -> None:
    """Twelve known items with cosine .7 to the asker; the new one's direction is nearly the asker's own."""
    asker = np.zeros((1, 1, D), np.float32)
    asker[0, 0, 0] = 1.0
    known = np.zeros((12, 1, D), np.float32)
    known[:, 0, 0], known[:, 0, 1] = 0.7, np.sqrt(1 - 0.49)
    rules = Rules(
        items=ModelItems(
            model_version="model-a",
            num_query_components=1,
            states=ItemStates(components=known),
            index=ItemIds.of(f"item-{row}" for row in range(12)),
            pair_gate=None,
        ),
        feedback=default_schema().feedback,
        max_remembered=16,
        max_pending=16,
    )
    components, gate = pack_query_state(QueryStates(components=asker))
    query = PackedQueryState(
        model_version="model-a", components=components, gate=gate, num_components=1, component_width=D
    )

    def place_of_the_new_item(share: SharePolicy | None) -> int:
        world = World(rules)
        world.log.put("new")
        rng = np.random.default_rng(0)
        for n in range(3):
            world.log.append(0, replace(interaction(rng, place=(0, n), item="new", user=f"user-{n}"), query=query))
        world.settled(min_users=3, new_item_policy=share)
        new = readers_view(world.outbox.deltas)[0]["new"].components[None]
        every = ItemStates(components=np.concatenate([known, new]))
        scores = MolScorer(every, None).scores(QueryStates(components=asker))[0]
        return int((scores > scores[-1]).sum())

    assert place_of_the_new_item(share_from(tmp_path, 0.9)) == 0
    # What is served without a word from anywhere is too short for this model.
    assert place_of_the_new_item(share_from(tmp_path, None)) == 12


def test_an_item_of_the_bundle_that_training_never_saw_is_a_new_item() -> None:
    rules = make_rules()
    rules = replace(rules, items=replace(rules.items, counts=np.minimum(np.arange(NUM_ITEMS), 1)))
    world, rng = World(rules), np.random.default_rng(0)
    for n, user in enumerate(("a", "a", "b", "b")):
        for item in ("item-0", "item-1"):
            world.log.append(0, interaction(rng, place=(0, 2 * n + (item == "item-1")), item=item, user=f"user-{user}"))
    running = world.settled(min_users=3, new_item_policy=SharePolicy(kind="fixed", least=0.4))
    assert readers_view(world.outbox.deltas)[0].keys() == {"item-1"}
    world.log.append(0, interaction(rng, place=(0, 8), item="item-0", user="user-c"))
    running.settle()
    published = readers_view(world.outbox.deltas)[0]
    sums = running.held.partitions[0].sums.of(["item-0"]).sums
    np.testing.assert_allclose(published["item-0"].components, 0.6 * unit(sums)[0], atol=1e-6)
    assert published["item-0"].model_share == 0
    assert published["item-1"].model_share > 0.8
