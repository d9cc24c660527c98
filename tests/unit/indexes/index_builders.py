"""Every retrieval algorithm under the conformance suite: append a `Builder`, and all of its claims are checked.

`exact` says that every answer must be proven exact, whatever the catalogue. An algorithm with parameters appears once
per setting worth testing; catalogues here have 1 to 600 items, so pools of a few items are small ones.
A pool must hold the true best 3 of 9 unit vectors in a plane: one that picks at random needs room for all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

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
    """One algorithm with its parameters: a name for the test report, how to build it, and whether it must be exact."""

    name: str
    build: Callable[[ItemStates, PairGate | None], Index]
    exact: bool


def segment_on_device(kind: Callable[..., Index], **sizes: int) -> Callable[[MolScorer, PairGate | None], Index]:
    """Builds an algorithm on PyTorch's CPU over a segment of a mutable index."""

    def build(scorer: MolScorer, pair_gate: PairGate | None) -> Index:
        states = ItemStates(components=scorer.components, gate=scorer.item_gate)
        return kind(on_device(states, pair_gate), **sizes)

    return build


def mutable_anisotropic(items: ItemStates, gate: PairGate | None, *, coded: bool) -> Index:
    """Segments and delta coded by the codebooks of all items, as a bundle has them."""
    codebooks = catalogue_codebooks(items, gate)

    def build(scorer: MolScorer, pair_gate: PairGate | None) -> Index:
        return Anisotropic(scorer, pair_gate, codebooks=codebooks, pool_size=8)

    return MutableAsIndex(items, gate, build, coded=coded)


def on_device(items: ItemStates, gate: PairGate | None) -> CardPasses:
    """States on PyTorch's CPU, whose steps are those of a card but for the kernels."""
    return CardPasses(DeviceScorer(items, gate, device=torch.device("cpu")))


BUILDERS: list[Builder] = [
    Builder("brute_force", BruteForce, exact=True),
    # A pool that is the whole catalogue must make an exact answer, too.
    Builder("top_k_avg_all", lambda items, gate: TopKAvg(items, gate, pool_size=len(items) + 1), exact=True),
    Builder("top_k_avg_8", lambda items, gate: TopKAvg(items, gate, pool_size=8), exact=False),
    Builder(
        "top_k_per_embedding_all",
        lambda items, gate: TopKPerEmbedding(items, gate, pool_size=len(items) + 1),
        exact=True,
    ),
    Builder("top_k_per_embedding_3", lambda items, gate: TopKPerEmbedding(items, gate, pool_size=3), exact=False),
    Builder(
        "combined_top_k_2_8",
        lambda items, gate: CombinedTopK(items, gate, pair_pool_size=2, average_pool_size=8),
        exact=False,
    ),
    # Quantized answers dot products alone; with more pairs these builders fall to pools.
    Builder(
        "quantized_exact",
        lambda items, gate: (
            Quantized(items, gate, cells=Cells(num_cells=7, bits=8))
            if items.components.shape[1] == 1 and (items.gate is None or items.gate.shape[1] == 1) and gate is None
            else TopKAvg(items, gate, pool_size=len(items) + 1)
        ),
        exact=True,
    ),
    Builder(
        "quantized_2_cells",
        lambda items, gate: (
            Quantized(items, gate, pool_size=8, visit=Visit(probes=2), cells=Cells(num_cells=7, bits=4))
            if items.components.shape[1] == 1 and (items.gate is None or items.gate.shape[1] == 1) and gate is None
            else QuantizedTangents(items, gate, pool_size=8, visit=Visit(probes=2, reach=0.5))
        ),
        exact=False,
    ),
    Builder(
        "quantized_tangents_8",
        lambda items, gate: QuantizedTangents(items, gate, pool_size=8, cells=Cells(num_cells=5, bits=8)),
        exact=False,
    ),
    Builder("quantized_tangents_40", lambda items, gate: QuantizedTangents(items, gate, pool_size=40), exact=False),
    # FAISS is an optional extra.
    *(
        Builder(
            name,
            lambda items, gate, sizes=sizes: Anisotropic(
                items, gate, codebooks=catalogue_codebooks(items, gate), **sizes
            ),
            exact=False,
        )
        for name, sizes in (
            ("anisotropic_8", {"pool_size": 8, "visit": Visit(probes=2)}),
            ("anisotropic_40", {"pool_size": 40}),
        )
        if find_spec("faiss")
    ),
    *(
        Builder(name, lambda items, gate, coded=coded: mutable_anisotropic(items, gate, coded=coded), exact=False)
        for name, coded in (("mutable_anisotropic_8", False), ("mutable_coded_anisotropic_8", True))
        if find_spec("faiss")
    ),
    # Half of the items in the main segment, half in the delta.
    Builder("mutable_brute_force", lambda items, gate: MutableAsIndex(items, gate, BruteForce), exact=True),
    Builder(
        "mutable_top_k_avg_8",
        lambda items, gate: MutableAsIndex(
            items, gate, lambda scorer, pair_gate: TopKAvg(scorer, pair_gate, pool_size=8)
        ),
        exact=False,
    ),
    Builder(
        "mutable_coded_brute_force",
        lambda items, gate: MutableAsIndex(items, gate, BruteForce, coded=True),
        exact=True,
    ),
    Builder(
        "mutable_coded_top_k_avg_8",
        lambda items, gate: MutableAsIndex(
            items, gate, lambda scorer, pair_gate: TopKAvg(scorer, pair_gate, pool_size=8), coded=True
        ),
        exact=False,
    ),
    # States on a torch device; the CPU's steps are those of a card, but for the kernels.
    Builder("device_brute_force", lambda items, gate: BruteForce(on_device(items, gate)), exact=True),
    Builder(
        "device_top_k_avg_8",
        lambda items, gate: TopKAvg(on_device(items, gate), pool_size=8),
        exact=False,
    ),
    Builder(
        "device_top_k_avg_all",
        lambda items, gate: TopKAvg(on_device(items, gate), pool_size=len(items) + 1),
        exact=True,
    ),
    Builder(
        "device_top_k_per_embedding_3",
        lambda items, gate: TopKPerEmbedding(on_device(items, gate), pool_size=3),
        exact=False,
    ),
    Builder(
        "device_combined_top_k_2_8",
        lambda items, gate: CombinedTopK(on_device(items, gate), pair_pool_size=2, average_pool_size=8),
        exact=False,
    ),
    # The same as segments of an index that changes between searches, its delta on the CPU.
    *(
        Builder(
            f"mutable_{name}",
            lambda items, gate, build=build, coded=coded: MutableAsIndex(
                items, gate, build, coded=coded, moving=not coded
            ),
            exact=exact,
        )
        for name, build, coded, exact in (
            ("moving_device_brute_force", segment_on_device(BruteForce), False, True),
            ("moving_device_top_k_avg_8", segment_on_device(TopKAvg, pool_size=8), False, False),
            (
                "moving_device_top_k_per_embedding_3",
                segment_on_device(TopKPerEmbedding, pool_size=3),
                False,
                False,
            ),
            ("coded_device_brute_force", segment_on_device(BruteForce), True, True),
            ("coded_device_top_k_avg_8", segment_on_device(TopKAvg, pool_size=8), True, False),
        )
    ),
    # Pools far smaller than the catalogues, so that the bound pass has something to drop.
    *(
        Builder(kind.name, lambda items, gate, kind=kind: kind(items, gate, pool_size=4), exact=True)
        for kind in (ExactAlgorithm1, ExactLowPrecision, Exact)
    ),
]
