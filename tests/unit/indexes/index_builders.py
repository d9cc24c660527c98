"""Every retrieval algorithm under the conformance suite: append a `Builder`, and all of its claims are checked.

`exact` says that every answer must be proven exact, whatever the catalogue. An algorithm with parameters appears once
per setting worth testing; catalogues here have 1 to 600 items, so pools of a few items are small ones.
A pool must hold the true best 3 of 9 unit vectors in a plane: one that picks at random needs room for all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from mutable_as_index import MutableAsIndex

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.card_passes import CardPasses
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.exact.cheapest import Exact
from services.algorithms.indexes.exact.two_pass import ExactAlgorithm1, ExactLowPrecision
from services.algorithms.indexes.protocol import Index
from services.algorithms.indexes.quantized.anisotropic import Anisotropic
from services.algorithms.indexes.quantized.dot_products import Quantized
from services.algorithms.indexes.quantized.tangents import QuantizedTangents
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.device import DeviceScorer
from services.algorithms.ops.quantized_scan import Cells, Visit
from services.algorithms.scoring.states import ItemStates, PairGate
from services.offline.training.codebooks.inverted_file import catalogue_codebooks


@dataclass(frozen=True)
class Builder:
    """One algorithm with its parameters: a name for the test report, how to make it, and whether it must be exact."""

    name: str
    make: Callable[[MolScorer], Index]
    exact: bool

    def build(self, items: ItemStates, gate: PairGate | None) -> Index:
        return self.make(MolScorer(items, gate))


def on_device(scorer: MolScorer) -> CardPasses:
    """States on PyTorch's CPU, whose steps are those of a card but for the kernels."""
    states = ItemStates(components=scorer.components, gate=scorer.item_gate)
    return CardPasses(DeviceScorer(states, scorer.pair_gate, device=torch.device("cpu")))


def anisotropic(scorer: MolScorer, **sizes: Any) -> Index:
    states = ItemStates(components=scorer.components, gate=scorer.item_gate)
    return Anisotropic(scorer, codebooks=catalogue_codebooks(states, scorer.pair_gate), **sizes)


def mutable_anisotropic(scorer: MolScorer, *, coded: bool) -> Index:
    """Segments and delta coded by the codebooks of all items, as a bundle has them."""
    states = ItemStates(components=scorer.components, gate=scorer.item_gate)
    codebooks = catalogue_codebooks(states, scorer.pair_gate)
    return MutableAsIndex(scorer, lambda part: Anisotropic(part, codebooks=codebooks, pool_size=8), coded=coded)


def top_k_avg_8(scorer: MolScorer) -> Index:
    return TopKAvg(scorer, pool_size=8)


def on_device_8(scorer: MolScorer) -> Index:
    return TopKAvg(on_device(scorer), pool_size=8)


def on_device_3(scorer: MolScorer) -> Index:
    return TopKPerEmbedding(on_device(scorer), pool_size=3)


def all_on_device(scorer: MolScorer) -> Index:
    return BruteForce(on_device(scorer))


BUILDERS: list[Builder] = [
    Builder("brute_force", BruteForce, exact=True),
    # A pool that is the whole catalogue must make an exact answer, too.
    Builder("top_k_avg_all", lambda scorer: TopKAvg(scorer, pool_size=scorer.num_items + 1), exact=True),
    Builder("top_k_avg_8", top_k_avg_8, exact=False),
    Builder(
        "top_k_per_embedding_all", lambda scorer: TopKPerEmbedding(scorer, pool_size=scorer.num_items + 1), exact=True
    ),
    Builder("top_k_per_embedding_3", lambda scorer: TopKPerEmbedding(scorer, pool_size=3), exact=False),
    Builder(
        "combined_top_k_2_8", lambda scorer: CombinedTopK(scorer, pair_pool_size=2, average_pool_size=8), exact=False
    ),
    # Quantized answers dot products alone; with more pairs these builders fall to pools.
    Builder(
        "quantized_exact",
        lambda scorer: (
            Quantized(scorer, cells=Cells(num_cells=7, bits=8))
            if scorer.num_pairs == 1
            else TopKAvg(scorer, pool_size=scorer.num_items + 1)
        ),
        exact=True,
    ),
    Builder(
        "quantized_2_cells",
        lambda scorer: (
            Quantized(scorer, pool_size=8, visit=Visit(probes=2), cells=Cells(num_cells=7, bits=4))
            if scorer.num_pairs == 1
            else QuantizedTangents(scorer, pool_size=8, visit=Visit(probes=2, reach=0.5))
        ),
        exact=False,
    ),
    Builder(
        "quantized_tangents_8",
        lambda scorer: QuantizedTangents(scorer, pool_size=8, cells=Cells(num_cells=5, bits=8)),
        exact=False,
    ),
    Builder("quantized_tangents_40", lambda scorer: QuantizedTangents(scorer, pool_size=40), exact=False),
    # FAISS is an optional extra.
    *(
        builder
        for builder in (
            Builder(
                "anisotropic_8", lambda scorer: anisotropic(scorer, pool_size=8, visit=Visit(probes=2)), exact=False
            ),
            Builder("anisotropic_40", lambda scorer: anisotropic(scorer, pool_size=40), exact=False),
            Builder("mutable_anisotropic_8", partial(mutable_anisotropic, coded=False), exact=False),
            Builder("mutable_coded_anisotropic_8", partial(mutable_anisotropic, coded=True), exact=False),
        )
        if find_spec("faiss")
    ),
    # States on a torch device; the CPU's steps are those of a card, but for the kernels.
    Builder("device_brute_force", all_on_device, exact=True),
    Builder("device_top_k_avg_8", on_device_8, exact=False),
    Builder(
        "device_top_k_avg_all", lambda scorer: TopKAvg(on_device(scorer), pool_size=scorer.num_items + 1), exact=True
    ),
    Builder("device_top_k_per_embedding_3", on_device_3, exact=False),
    Builder(
        "device_combined_top_k_2_8",
        lambda scorer: CombinedTopK(on_device(scorer), pair_pool_size=2, average_pool_size=8),
        exact=False,
    ),
    # Half of the items in the main segment, half in the delta, with an algorithm of its own if it is coded. One on a
    # device also changes between searches; its delta is on the CPU.
    *(
        Builder(
            f"mutable_{name}",
            lambda scorer, build=build, name=name: MutableAsIndex(
                scorer, build, coded="coded" in name, moving="moving" in name
            ),
            exact=build in (BruteForce, all_on_device),
        )
        for name, build in (
            ("brute_force", BruteForce),
            ("top_k_avg_8", top_k_avg_8),
            ("coded_brute_force", BruteForce),
            ("coded_top_k_avg_8", top_k_avg_8),
            ("moving_device_brute_force", all_on_device),
            ("moving_device_top_k_avg_8", on_device_8),
            ("moving_device_top_k_per_embedding_3", on_device_3),
            ("coded_device_brute_force", all_on_device),
            ("coded_device_top_k_avg_8", on_device_8),
        )
    ),
    # Pools far smaller than the catalogues, so that the bound pass has something to drop.
    *(
        Builder(kind.name, lambda scorer, kind=kind: kind(scorer, pool_size=4), exact=True)
        for kind in (ExactAlgorithm1, ExactLowPrecision, Exact)
    ),
]
