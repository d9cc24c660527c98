"""Query states of a trained bundle's users: the served state before a user's last event, whose item is its label.

Letters: B queries, L history length.
"""

from pathlib import Path

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.scoring.states import QueryStates
from services.offline.datasets import Interactions, load_dataset
from services.offline.evaluation.catalogues.scene import IntArray, Scene
from services.offline.training.bundling import load_model
from services.offline.training.evaluation import states_before
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.sequences import Histories


def trained_scene(path: Path, *, num_queries: int, seed: int) -> Scene:
    """Return a bundle's items with the states of at most `num_queries` of its users, drawn by `seed`.

    Raises: BundleError; ValueError if the data has other items or no user with two events.
    """
    bundle = load_bundle(path)
    name = str(bundle.manifest.data.get("name", ""))
    interactions = load_dataset(name)
    if interactions.item_ids != bundle.item_ids:
        raise ValueError(
            f"dataset={name!r} has {interactions.num_items} items; {path} was trained on {bundle.num_items} others"
        )
    queries, labels = query_states(load_model(bundle), bundle, interactions, num_queries=num_queries, seed=seed)
    return Scene(
        name=f"{path.name} as trained",
        items=bundle.item_states,
        queries=queries,
        pair_gate=bundle.pair_gate,
        label_draws=labels[:, None],
    )


def query_states(
    model: SequentialModel, bundle: Bundle, interactions: Interactions, *, num_queries: int, seed: int
) -> tuple[QueryStates, IntArray]:
    """Return states before the last events of drawn users, and those events' items (B,).

    Raises: ValueError if nobody has two events.
    """
    histories = Histories.of(interactions)
    able = np.flatnonzero(np.diff(histories.offsets) >= 2)
    if not len(able):
        raise ValueError(f"no user of {interactions.name} has two events; a query needs one and a label")
    chosen = np.sort(np.random.default_rng(seed).permutation(able)[:num_queries])
    last = histories.offsets[chosen + 1] - 1
    index = None
    if model.encoder_shape.uses_user_index:
        index = np.array([bundle.user_index.get(user_id, -1) for user_id in interactions.user_ids], dtype=np.int64)
    return states_before(model, histories, last, chosen, index), histories.items[last].astype(np.int64)
