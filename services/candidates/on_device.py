"""The indexes of a CUDA device. Only this module of the process loads PyTorch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.by_name import Algorithm, make_card_index
from services.algorithms.indexes.card_passes import CardPasses
from services.algorithms.indexes.protocol import Index
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.device import DeviceScorer
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.candidates.metrics import TRUTH
from services.platform.config import ConfigError


class DeviceBuild:
    """Builds every algorithm over one copy of the item states on a device; the audit's truth stays in memory.

    The first build compiles the kernels: otherwise the first searches would wait for seconds. The CPU scores rows of a
    delta. copied_bytes_per_item: an item's states on the device. Raises: ValueError for an unsupported algorithm.
    """

    def __init__(self, algorithms: Sequence[Algorithm], device: torch.device) -> None:
        self._algorithms, self._device, self.copied_bytes_per_item = algorithms, device, 0
        self._compiled = False

    def __call__(self, items: MolScorer) -> Mapping[str, Index]:
        states = ItemStates(components=items.components, gate=items.item_gate)
        scorer = DeviceScorer(states, items.pair_gate, device=self._device)
        self.copied_bytes_per_item = scorer.nbytes // scorer.num_items
        passes = CardPasses(scorer)
        indexes: dict[str, Index] = {one.text: make_card_index(one, passes) for one in self._algorithms}
        if not self._compiled:
            for one in indexes.values():
                _search_each_way(one, scorer)
            self._compiled = True
        return {**indexes, TRUTH: BruteForce(items)}


def _search_each_way(index: Index, scorer: DeviceScorer) -> None:
    """Search in each case that has its own kernels: one query or more than a tile, with or without a filter."""
    shape = scorer.shape
    for batch in (1, 33):
        components = np.ones((batch, shape.num_query_components, scorer.width), dtype=np.float32)
        components /= np.sqrt(scorer.width)
        gate = np.zeros((batch, shape.num_pairs), dtype=np.float32) if shape.gated else None
        for allowed in (None, np.ones(scorer.num_items, dtype=np.bool_)):
            index.search(QueryStates(components=components, gate=gate), min(100, scorer.num_items), allowed)


def cuda_build(algorithms: Sequence[Algorithm]) -> DeviceBuild:
    """Return a build for CUDA. Raises: ConfigError if PyTorch finds no device."""
    if not torch.cuda.is_available():
        raise ConfigError("FRESHET_CANDIDATES_DEVICE='cuda' but PyTorch sees no CUDA card here; allowed: cpu")
    return DeviceBuild(algorithms, torch.device("cuda"))
