"""What a process that scores nothing holds of a catalogue: each function is for a process of its own, and says how much
the resident memory of that grew, in MiB."""

from collections.abc import Sequence
from pathlib import Path

import psutil

from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.item_table.ids import ByItem
from services.algorithms.item_table.strings import Strings
from services.gateway.recommend.catalogue import DescribedItems
from services.gateway.recommend.popular import PopularItems


def gateway_mib(folder: Path, titles: Sequence[str]) -> float:
    """Ids, titles, categories and counts as the gateway has them; the items' titles are these, each with a number."""
    before = _resident_mib()
    bundle = load_bundle(folder)
    popular = PopularItems(bundle.item_index, bundle.counts, bundle.categories, bundle.attributes)
    column = Strings.of(f"{titles[row % len(titles)]} {row}" for row in range(bundle.num_items))
    held = bundle, DescribedItems(ByItem(bundle.item_index, column), popular)
    grown = _resident_mib() - before
    del held
    return grown


def names_mib(folder: Path, titles: Sequence[str]) -> float:
    """Ids and the number of each."""
    before = _resident_mib()
    bundle = load_bundle(folder)
    held = bundle, bundle.item_index
    grown = _resident_mib() - before
    del held
    return grown


def _resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20
