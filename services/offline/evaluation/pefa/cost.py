"""`freshet bench pefa-cost`: what PEFA costs a search: without, with refreshed states (XS), and with a memory (XL).

The ratio is of CPU, because a search is one thread's work and waiting is nobody's cost. Query by query all settings
take their turn, in an order that rotates; the ratio is the median over turns, its interval a bootstrap of
the turns. Recall is the share of the version's own brute-force answer that was found.

Letters: B queries, K results, k neighbours, n remembered interactions.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import make_indexes, parse_algorithm
from services.algorithms.indexes.mutable.index import Build
from services.algorithms.indexes.protocol import Index, take_queries
from services.algorithms.items.catalogue import Catalogue, catalogue_from_bundle
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.pefa.memory import MemoryEntry
from services.algorithms.pefa.refresh import unit
from services.algorithms.pefa.votes import VotingIndex
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.scoring.states import PairGate, QueryStates
from services.algorithms.scoring.voted_answers import joined_answer, num_negative
from services.offline.evaluation.catalogues.trained import trained_scene
from services.offline.evaluation.common.recall import recall
from services.offline.evaluation.common.report import Report, Request, plain_page, report_of, written
from services.offline.evaluation.common.timing import Times, use_threads

Floats = npt.NDArray[np.float64]

_TRUTH = "brute_force"
_BOOTSTRAPS = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of everything; delta_items: how many states changed since the last merge where there is a delta."""

    num_queries: int = 200
    k: int = 200
    remembered: int = 65_536
    neighbours: int = 32
    delta_items: int = 512
    turns: int = 15
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Refreshed:
    """A change as the stream brings it."""

    item_id: str
    components: npt.NDArray[np.float32]
    gate: npt.NDArray[np.float32] | None
    model_share: float = 0.5
    num_interactions: int = 10
    dropped: bool = False


def rows(path: Path, algorithms: Sequence[str], sizes: Sizes) -> list[dict[str, Any]]:
    """One row per algorithm and setting. Raises: BundleError, ValueError as loading and searching do."""
    queries = trained_scene(path, num_queries=sizes.num_queries, seed=sizes.seed).queries
    base = catalogue_from_bundle(load_bundle(path))
    rng = np.random.default_rng(sizes.seed)
    changes = _changes(base, rng)
    plain = {setting: LiveCatalogue(base, build=_build(algorithms)) for setting in ("none", "XS", "XS, delta")}
    for setting in ("XS", "XS, delta"):
        plain[setting].apply(0, changes)
        plain[setting].index.merge()
    plain["XS, delta"].apply(1, [changes[row] for row in rng.permutation(len(changes))[: sizes.delta_items].tolist()])
    memory = _memory(base, queries, sizes, rng)
    found: list[dict[str, Any]] = []
    for name in algorithms:
        settings: dict[str, Callable[[QueryStates], Sequence[str]]] = {
            setting: partial(_plain, catalogue, algorithm=name, k=sizes.k) for setting, catalogue in plain.items()
        }
        for setting, below in (("XL", "none"), ("XS + XL", "XS")):
            settings[setting] = partial(_voted, plain[below], memory, algorithm=name, sizes=sizes)
        seconds = _seconds(settings, queries, sizes.turns)
        for setting, (wall, cpu) in seconds.items():
            ratios = cpu / seconds["none"][1]
            drawn = np.median(rng.choice(ratios, size=(_BOOTSTRAPS, len(ratios))), axis=1)
            found.append(
                {
                    "algorithm": name,
                    "setting": setting,
                    "median_ms": round(1e3 * float(np.median(wall)), 4),
                    "cpu_ms": round(1e3 * float(np.median(cpu)), 4),
                    "ratio": round(float(np.median(ratios)), 3),
                    "ratio_95": [round(float(edge), 3) for edge in np.quantile(drawn, [0.025, 0.975])],
                    "recall": _recall(plain[setting], queries, name, sizes.k) if setting in plain else None,
                }
            )
    return found


def _build(algorithms: Sequence[str]) -> Build:
    parsed = [parse_algorithm(name) for name in algorithms]

    def build(items: MolScorer, pair_gate: PairGate | None, /) -> Mapping[str, Index]:
        ranks = np.arange(items.num_items)
        return {_TRUTH: BruteForce(items)} | make_indexes(parsed, items, ranks)

    return build


def _changes(base: Catalogue, rng: np.random.Generator) -> list[_Refreshed]:
    """Every item half its own and half a direction: the mean of a few other items', as its users' states would be."""
    states = base.states
    others = rng.integers(0, base.num_items, size=(base.num_items, 8))
    learnt = unit(states.components[others].astype(np.float64).mean(axis=1))
    components = (0.5 * states.components + 0.5 * learnt).astype(np.float32)
    return [
        _Refreshed(item_id=item_id, components=components[row], gate=None if states.gate is None else states.gate[row])
        for row, item_id in enumerate(base.item_ids)
    ]


def _memory(base: Catalogue, queries: QueryStates, sizes: Sizes, rng: np.random.Generator) -> VotingIndex:
    """Real query states, moved a little so that no two are the same, each with an item."""
    _, num_components, width = queries.components.shape
    index = VotingIndex(num_components=num_components, width=width, model_version="m", leave_out=base.user_component)
    drawn = rng.integers(0, len(queries), size=sizes.remembered)
    items = rng.integers(0, base.num_items, size=sizes.remembered)
    entries = []
    for number, (query, item) in enumerate(zip(drawn.tolist(), items.tolist(), strict=True)):
        noise = rng.normal(scale=0.3 / np.sqrt(width), size=(num_components, width))
        entries.append(
            MemoryEntry(
                entry_id=str(number),
                item_id=base.rows.strings[item],
                components=unit(queries.components[query] + noise).astype(np.float16),
                weight=1.0,
                interaction_type="rating",
                event_seconds=number,
            )
        )
    index.apply(upserts=entries)
    index.index.merge()
    return index


def _plain(catalogue: LiveCatalogue, query: QueryStates, *, algorithm: str, k: int) -> Sequence[str]:
    return catalogue.index.search(query, k, algorithm=algorithm).item_ids[0]


def _voted(
    catalogue: LiveCatalogue, memory: VotingIndex, query: QueryStates, *, algorithm: str, sizes: Sizes
) -> Sequence[str]:
    votes = memory.votes(query, sizes.neighbours)
    top = catalogue.index.search(query, sizes.k + num_negative(votes), algorithm=algorithm)
    found = (top.item_ids[0], top.scores[0][: len(top.item_ids[0])], top.certificates[0])
    return joined_answer(
        catalogue, catalogue.served, query, 0, found, votes[0], k=sizes.k, wanted=ItemFilter(), model_share=0.5
    ).item_ids


def _seconds(
    settings: Mapping[str, Callable[[QueryStates], Sequence[str]]], queries: QueryStates, turns: int
) -> dict[str, Floats]:
    """Median seconds of one search per turn, by the clock and of CPU: (2, turns)."""
    alone = [take_queries(queries, query, query + 1) for query in range(len(queries))]
    for search in settings.values():
        for query in alone[:20]:
            search(query)
    names = list(settings)
    times: dict[str, list[Floats]] = {setting: [] for setting in settings}
    for _ in range(turns):
        samples = {setting: Times() for setting in settings}
        for place, query in enumerate(alone):
            first = place % len(names)
            for setting in names[first:] + names[:first]:
                samples[setting].call(settings[setting], query)
        for setting, found in samples.items():
            times[setting].append(np.median(np.array([found.wall, found.cpu]), axis=1))
    return {setting: np.stack(found, axis=1) for setting, found in times.items()}


def _recall(catalogue: LiveCatalogue, queries: QueryStates, algorithm: str, k: int) -> float:
    found = catalogue.index.search(queries, k, algorithm=algorithm).item_ids
    truth = catalogue.index.search(queries, k, algorithm=_TRUTH).item_ids
    return round(recall(found, truth), 4)


def run(request: Request, bundle: Path, algorithms: Sequence[str], sizes: Sizes) -> Report:
    """One search per query and setting on one thread; writes pefa-cost.{md,json}. Raises: as `rows`."""
    began = time.perf_counter()
    use_threads(1)
    found = rows(bundle, algorithms, sizes)
    report = report_of("pefa-cost", request, found, began) | {"bundle": bundle.name, "sizes": asdict(sizes)}
    return written(request, report, partial(plain_page, Path(__file__).with_name("cost.template.md")))
