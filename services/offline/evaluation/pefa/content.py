"""What an item's title is worth before anybody touched it: content states of withheld items beside their trained ones.

A tenth of a bundle's items, drawn at random, loses its states; the map from titles to states is fitted on the others.
The question: people whose next item is a withheld one, do they find it among the first 50 of all items? The encoder
of histories was trained with those items, so "trained" is what content could at best stand in for.

Letters: B queries, X items.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundle import load_bundle
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.content import TextEncoder, TextStates
from services.algorithms.states import ItemStates, QueryStates
from services.offline.evaluation.catalogues.scene import Scene
from services.offline.evaluation.catalogues.trained import trained_scene
from services.offline.evaluation.common.recall import pair_ranks

Row = dict[str, Any]

WITHHELD = 0.1
_CUT = 50


def rows(bundle: Path, encoder: TextEncoder, *, num_queries: int, seed: int) -> list[Row]:
    """`withheld_rows` of a bundle, with people of the data set that it names.

    Raises: BundleError for a bundle that is none, ValueError if its data or texts are missing.
    """
    scene = trained_scene(bundle, num_queries=num_queries, seed=seed)
    loaded = load_bundle(bundle)
    return withheld_rows(scene, encoder, titles=loaded.titles, categories=loaded.categories, seed=seed)


def withheld_rows(
    scene: Scene, encoder: TextEncoder, *, titles: Sequence[str], categories: Sequence[Sequence[str]], seed: int
) -> list[Row]:
    """Hit rate@50 of withheld items by their states: trained, from the title, the mean of the others.

    Raises: ValueError if no query's next item is withheld.
    """
    num_items = len(scene.items)
    withheld = np.zeros(num_items, dtype=bool)
    withheld[np.random.default_rng(seed).permutation(num_items)[: round(WITHHELD * num_items)]] = True
    kept, gone = np.flatnonzero(~withheld), np.flatnonzero(withheld)
    texts = TextStates(
        encoder,
        titles=[titles[row] for row in kept.tolist()],
        categories=[categories[row] for row in kept.tolist()],
        items=_taken(scene.items, kept),
    )
    content = texts.of([titles[row] for row in gone.tolist()], [categories[row] for row in gone.tolist()])
    mean = scene.items.components[kept].mean(axis=0, dtype=np.float64)
    mean /= np.linalg.norm(mean, axis=-1, keepdims=True)
    averaged = ItemStates(components=np.repeat(mean[None], len(gone), axis=0).astype(np.float32), gate=content.gate)
    asked = np.flatnonzero(withheld[scene.labels])
    if not len(asked):
        raise ValueError(f"none of {len(scene.queries)} queries has a withheld item next; ask with more queries")
    queries = QueryStates(
        components=scene.queries.components[asked],
        gate=None if scene.queries.gate is None else scene.queries.gate[asked],
    )
    pairs = np.column_stack([np.arange(len(asked)), scene.labels[asked]])
    trained = _taken(scene.items, gone)
    found = []
    for name, states in (("trained", trained), ("from the title", content), ("mean of the others", averaged)):
        scores = MolScorer(_with(scene.items, gone, states), scene.pair_gate).scores(queries)
        ranks = pair_ranks(np.asarray(scores), pairs)
        cosines = (states.components * trained.components).sum(axis=-1)
        found.append(
            {
                "table": "content",
                "data": scene.name,
                "state": name,
                "items": num_items,
                "withheld": len(gone),
                "queries": len(asked),
                "cosine_to_trained": float(cosines.mean()),
                f"hit_rate@{_CUT}": float((ranks < _CUT).mean()),
                "chance": _CUT / num_items,
                "ridge": texts.map.ridge,
            }
        )
    return found


def _taken(items: ItemStates, places: npt.NDArray[np.integer]) -> ItemStates:
    return ItemStates(
        components=np.array(items.components[places]),
        gate=None if items.gate is None else np.array(items.gate[places]),
    )


def _with(items: ItemStates, places: npt.NDArray[np.integer], states: ItemStates) -> ItemStates:
    components = np.array(items.components)
    components[places] = states.components
    if items.gate is None or states.gate is None:
        return ItemStates(components=components)
    gate = np.array(items.gate)
    gate[places] = states.gate
    return ItemStates(components=components, gate=gate)
