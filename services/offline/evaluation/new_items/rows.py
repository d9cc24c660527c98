"""`freshet bench new-items`: what a new item's title and categories are worth before anybody touched it.

A tenth of a bundle's items, drawn at random, loses its states; the map from texts to states is fitted on the others, as
the refresher does. Two kinds of people are asked, who come after training: those whose next item is a withheld one, and
those whose next item is among the 20 nearest of a withheld one, so that they may like it, too. Where does it stand
among all items, and what does its standing there cost the others? The encoder of histories was trained with those
items, so "trained" is what content could at best stand in for.

Letters: B queries, X items, W withheld items, E pairs of a query and a withheld item.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.content import TextEncoder, TextStates
from services.algorithms.scoring.states import ItemStates
from services.offline.evaluation.catalogues.scene import Scene
from services.offline.evaluation.catalogues.trained import trained_scene
from services.offline.evaluation.common.recall import pair_ranks
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written

Row = dict[str, Any]
Rows = npt.NDArray[np.integer]

WITHHELD, NEAREST = 0.1, 20
_CUT, _KNOWN_CUT = 50, 10
_QUERIES = 6_000


def run(request: Request, *, bundles: Sequence[Path], encoder: TextEncoder) -> Report:
    """Measure on bundles of one or more data sets, a seed each; writes new-items.{md,json}.

    Raises: BundleError for a bundle that is none, ValueError if its data or texts are missing.
    """
    began = time.perf_counter()
    found: dict[str, list[list[Row]]] = {}
    for number, path in enumerate(bundles, start=1):
        request.say(f"bundle {number} of {len(bundles)}")
        loaded = load_bundle(path)
        scene = trained_scene(path, num_queries=500 if request.quick else _QUERIES, seed=request.seed)
        found.setdefault(str(loaded.manifest.data["name"]), []).append(
            withheld_rows(
                scene,
                encoder,
                titles=loaded.titles,
                categories=loaded.categories,
                counts=loaded.counts,
                seed=request.seed,
            )
        )
    rows = [{"data": data} | _over_seeds(states) for data, of in found.items() for states in zip(*of, strict=True)]
    return written(request, report_of("new-items", request, rows, began), page)


def page(report: Report) -> str:
    """new-items.md of a report; a `remark` is what a person adds to it."""
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report})


def _over_seeds(rows: Sequence[Row]) -> Row:
    """Means, and of hit rates the least and the most."""
    names = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    row: Row = {"state": rows[0]["state"], "models": len(rows)}
    row |= {name: round(float(np.mean([one[name] for one in rows])), 4) for name in names}
    for name in ("next_hits", "near_hits", "known_hits"):
        row[f"{name}_least"], row[f"{name}_most"] = (round(of(one[name] for one in rows), 4) for of in (min, max))
    return row


def withheld_rows(
    scene: Scene,
    encoder: TextEncoder,
    *,
    titles: Sequence[str],
    categories: Sequence[Sequence[str]],
    counts: npt.NDArray[np.integer],
    seed: int,
) -> list[Row]:
    """By the withheld items' states: trained, from the text, the mean of the others, none.

    Raises: ValueError if no query's next item is withheld.
    """
    num_items = len(scene.items)
    withheld = np.zeros(num_items, dtype=bool)
    withheld[np.random.default_rng(seed).permutation(num_items)[: round(WITHHELD * num_items)]] = True
    kept, gone = np.flatnonzero(~withheld), np.flatnonzero(withheld)
    asked = np.flatnonzero(withheld[scene.labels])
    if not len(asked):
        raise ValueError(f"none of {len(scene.queries)} queries has a withheld item next; ask with more queries")
    texts = TextStates(
        encoder,
        titles=[titles[row] for row in kept.tolist()],
        categories=[categories[row] for row in kept.tolist()],
        items=_taken(scene.items, kept),
        counts=counts[kept],
    )
    content = texts.of([titles[row] for row in gone.tolist()], [categories[row] for row in gone.tolist()])
    mean = scene.items.components[kept].mean(axis=0, dtype=np.float64)
    mean /= np.linalg.norm(mean, axis=-1, keepdims=True)
    averaged = ItemStates(components=np.repeat(mean[None], len(gone), axis=0).astype(np.float32), gate=content.gate)
    trained = _taken(scene.items, gone)
    pairs = {
        "next": np.column_stack([asked, scene.labels[asked]]),
        "near": _near_pairs(scene, kept, gone),
        "known": np.column_stack([known := np.flatnonzero(~withheld[scene.labels]), scene.labels[known]]),
    }
    states: Mapping[str, ItemStates | None] = {
        "trained": trained,
        "from the text": content,
        "mean of the others": averaged,
        "none": None,
    }
    found = []
    for name, of in states.items():
        scorer = MolScorer(scene.items if of is None else _with(scene.items, gone, of), scene.pair_gate)
        scores = np.array(scorer.scores(scene.queries))
        if of is None:
            scores[:, gone] = -np.inf
        ranks = {kind: pair_ranks(scores, wanted) for kind, wanted in pairs.items()}
        is_there = of is not None
        found.append(
            {
                "state": name,
                "items": num_items,
                "withheld": len(gone),
                "cosine_to_trained": float((of.components * trained.components).sum(axis=-1).mean()) if of else 0.0,
                "next_queries": len(asked),
                "next_hits": float((ranks["next"] < _CUT).mean()) * is_there,
                "next_rank": float(np.median(ranks["next"]) + 1 if is_there else num_items),
                "near_queries": len(pairs["near"]),
                "near_hits": float((ranks["near"] < _CUT).mean()) * is_there,
                "near_rank": float(np.median(ranks["near"]) + 1 if is_there else num_items),
                "known_queries": len(pairs["known"]),
                "known_hits": float((ranks["known"] < _KNOWN_CUT).mean()),
                "chance": _CUT / num_items,
                "ridge": texts.map.ridge,
            }
        )
    return found


def _near_pairs(scene: Scene, kept: Rows, gone: Rows) -> npt.NDArray[np.int64]:
    """(E, 2): each query with each withheld item that the query's next item is near, by the trained states."""
    flat = scene.items.components.reshape(len(scene.items), -1)
    near = np.zeros((len(gone), len(flat)), dtype=bool)
    for row, item in enumerate(gone.tolist()):
        order = np.argsort(-(flat[kept] @ flat[item]), kind="stable")[:NEAREST]
        near[row, kept[order]] = True
    withheld, query = np.nonzero(near[:, scene.labels])
    return np.column_stack([query, gone[withheld]])


def _taken(items: ItemStates, places: Rows) -> ItemStates:
    return ItemStates(
        components=np.array(items.components[places]),
        gate=None if items.gate is None else np.array(items.gate[places]),
    )


def _with(items: ItemStates, places: Rows, states: ItemStates) -> ItemStates:
    components = np.array(items.components)
    components[places] = states.components
    if items.gate is None or states.gate is None:
        return ItemStates(components=components)
    gate = np.array(items.gate)
    gate[places] = states.gate
    return ItemStates(components=components, gate=gate)
