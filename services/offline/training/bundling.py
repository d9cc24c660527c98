"""Write a trained model as a bundle, and load a bundle's model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.pefa.contribution import mean_gate
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.algorithms.scoring.states import ItemStates
from services.offline.bundles.model import BundleContent, write_bundle
from services.offline.datasets import Interactions
from services.offline.training.codebooks.inverted_file import catalogue_codebooks
from services.offline.training.loop import TrainReport
from services.offline.training.models.sequential import SequentialModel


def save_bundle(
    path: Path,
    report: TrainReport,
    interactions: Interactions,
    *,
    data: Mapping[str, Any],
    metrics: Mapping[str, Any],
    new_item_length: float | None = None,
    neighbours: ItemNeighbours | None = None,
    events_yaml: bytes | None = None,
    attributes: pa.Table | None = None,
) -> Bundle:
    """Write the trained model as a bundle. `interactions`: its training data; items without an event in it get the
    state of new items.
    """
    model = report.model
    counts = interactions.item_counts()
    states, pair_gate = _without_untrained(model.all_item_states(), counts), model.pair_gate()
    user_ids: list[str] = []
    if report.user_index is not None:
        user_ids = [interactions.user_ids[code] for code in np.flatnonzero(report.user_index >= 0)]
    return write_bundle(
        path,
        BundleContent(
            encoder=model.encoder_shape,
            head=model.head_shape,
            weights={name: value.cpu().numpy() for name, value in model.state_dict().items()},
            item_states=states,
            pair_gate=pair_gate,
            item_ids=interactions.item_ids,
            titles=interactions.titles,
            categories=interactions.categories,
            counts=counts,
            user_ids=user_ids,
            data=data,
            metrics=metrics,
            new_item_length=new_item_length,
            neighbours=neighbours,
            absence=model.absence_shape,
            events_yaml=events_yaml,
            attributes=attributes,
            codebooks=catalogue_codebooks(states, pair_gate),
        ),
    )


def _without_untrained(states: ItemStates, counts: npt.NDArray[np.int64]) -> ItemStates:
    """Give items without an event zero components and the mean gate, as `cold_start_items` does. Changes `states`."""
    states.components[counts == 0] = 0
    if states.gate is not None:
        states.gate[counts == 0] = mean_gate(states.take(np.flatnonzero(counts)))
    return states


def load_model(bundle: Bundle) -> SequentialModel:
    """Return the bundle's model in PyTorch. Raises: RuntimeError if a weight is missing or misshapen."""
    manifest = bundle.manifest
    model = SequentialModel(
        bundle.encoder,
        manifest.head,
        num_items=manifest.num_items,
        num_users=manifest.num_users,
        absence=manifest.absence,
    )
    model.load_state_dict({name: torch.from_numpy(value) for name, value in bundle.weights().items()})
    return model.eval()
