"""Export the encoder as ONNX, checked against PyTorch, to the folder that the inference server loads.

Inputs: item_index (B, L), event_time (B, L), user_index (B,) only for a model with a user-id component, position (B,
M). Outputs: components (B, M, P_q, d) and, for a mixture, gate (B, M, P). B, L and M are dynamic. The largest allowed
difference is 1e-4. HSTU also gets the step graph of `step_export`.

Letters: B batch, L history length, M positions wanted, P_q query components, P component pairs, d component width.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from services.algorithms.bundles.model_bundle import (
    ENCODER_ONNX,
    ENCODER_STEP_ONNX,
    INFERENCE_SERVER_MODEL,
    Bundle,
    load_bundle,
)
from services.algorithms.encoding import incremental_encoding
from services.offline.bundles.model import add_files
from services.offline.datasets import Interactions
from services.offline.training.bundling import load_model
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.onnx_graphs import ExportError, refuse_difference, session, write_graph
from services.offline.training.sequences import Histories, windows_before
from services.offline.training.step_export import can_step, max_step_difference, write_step_onnx

_SERVER_TEMPLATE = Path(__file__).parents[3] / "deploy" / "inference_server" / "encoder"
_ONNX_IN_SERVER = f"{INFERENCE_SERVER_MODEL}/1/model.onnx"
_STEP_IN_SERVER = f"{INFERENCE_SERVER_MODEL}/1/step.onnx"
# The Python backend runs the encoder process's cache, and can import nothing else of this repository.
_CACHE_IN_SERVER = f"{INFERENCE_SERVER_MODEL}/1/incremental_encoding.py"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """The largest absolute difference from PyTorch over `histories_checked` histories, and the files' locations."""

    bundle: Bundle
    max_error: float
    histories_checked: int
    onnx_bytes: int


def export_bundle(
    bundle_dir: Path | str, *, interactions: Interactions | None = None, template: Path = _SERVER_TEMPLATE
) -> ExportReport:
    """Export a bundle's encoder into it, with the inference server's model folder.

    The check uses the longest and 63 other histories of `interactions`, or random ones.
    Raises: ExportError if an output differs by more than 1e-4, or if the server's folder template is missing.
    """
    bundle = load_bundle(bundle_dir)
    sources = _server_files(template)
    if interactions is not None and interactions.item_ids != bundle.item_ids:
        # Histories of other items are useless for the check.
        interactions = None
    if interactions is not None and bundle.encoder.actions:
        interactions, _ = interactions.with_actions(bundle.event_schema, bundle.encoder.actions)
    model = load_model(bundle)
    inputs = _histories(bundle, interactions)
    with tempfile.TemporaryDirectory() as scratch:
        onnx_file = Path(scratch) / ENCODER_ONNX
        write_onnx(model, onnx_file)
        error = max(max_difference(model, onnx_file, part) for part in _lengths_and_positions(inputs))
        refuse_difference(ENCODER_ONNX, error)
        sources = _named(sources, bundle.model_version, Path(scratch))
        sources |= {ENCODER_ONNX: onnx_file, _ONNX_IN_SERVER: onnx_file}
        if can_step(model):
            step_file = Path(scratch) / ENCODER_STEP_ONNX
            write_step_onnx(model, step_file)
            step_error = max_step_difference(model, session(step_file))
            refuse_difference(ENCODER_STEP_ONNX, step_error)
            error = max(error, step_error)
            cache_file = Path(incremental_encoding.__file__)
            sources |= {ENCODER_STEP_ONNX: step_file, _STEP_IN_SERVER: step_file, _CACHE_IN_SERVER: cache_file}
        exported = add_files(bundle.path, sources)
        size = onnx_file.stat().st_size
    return ExportReport(bundle=exported, max_error=error, histories_checked=len(inputs["item_index"]), onnx_bytes=size)


def write_onnx(model: SequentialModel, path: Path) -> None:
    """Write the graph that encodes whole histories. Raises: ExportError if a package is missing."""
    sample = _example(model)
    batch, length, wanted = (torch.export.Dim(name) for name in ("batch", "length", "positions"))
    dynamic: dict[str, Any] = {
        "item_index": {0: batch, 1: length},
        "event_time": {0: batch, 1: length},
        "position": {0: batch, 1: wanted},
    }
    if model.encoder_shape.uses_user_index:
        dynamic["user_index"] = {0: batch}
    outputs = ["components", "gate"] if model.head_shape.is_mixture else ["components"]
    write_graph(_Graph(model.eval()), sample, dynamic, path, inputs=list(sample), outputs=outputs)


@torch.no_grad()
def max_difference(model: SequentialModel, path: Path, inputs: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the largest absolute difference between ONNX Runtime and PyTorch over all outputs."""
    graph = _Graph(model.eval())
    expected = graph(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    found = session(path).run(None, dict(inputs))
    if len(found) != len(expected):
        raise ExportError(f"{path.name} has {len(found)} outputs; PyTorch gives {len(expected)}")
    return max(float(np.abs(a - b.numpy()).max()) for a, b in zip(found, expected, strict=True))


class _Graph(nn.Module):
    def __init__(self, model: SequentialModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, item_index: Tensor, event_time: Tensor, position: Tensor, user_index: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        components, gate = self.model.states_at(item_index, event_time, user_index, position)
        return (components,) if gate is None else (components, gate)


def _example(model: SequentialModel) -> dict[str, Tensor]:
    # Sizes differ and are neither 0 nor 1, so that the exporter mistakes no axis for a constant or for another axis.
    length = model.encoder_shape.max_history // 2 + 1
    sample = {
        "item_index": torch.zeros(3, length, dtype=torch.int64),
        "event_time": torch.arange(length).repeat(3, 1),
        "position": torch.zeros(3, 2, dtype=torch.int64),
    }
    if model.encoder_shape.uses_user_index:
        sample["user_index"] = torch.zeros(3, dtype=torch.int64)
    return sample


def _histories(bundle: Bundle, interactions: Interactions | None, count: int = 64) -> Arrays:
    rng = np.random.default_rng(0)
    if interactions is None:
        lengths = rng.integers(1, bundle.max_history, count)
        lengths[0] = bundle.max_history - 1
        offsets = np.append(0, np.cumsum(lengths))
        items = rng.integers(0, bundle.num_items, offsets[-1])
        histories = Histories(
            items=items,
            times=np.sort(rng.integers(10**9, 10**9 + 10**8, len(items))),
            offsets=offsets,
            actions=rng.integers(0, 1 + len(bundle.encoder.actions), len(items)),
        )
        chosen = np.arange(count)
        users = rng.integers(-1, max(1, bundle.manifest.num_users), count)
    else:
        histories = Histories.of(interactions)
        sizes = np.diff(histories.offsets)
        chosen = np.append(rng.permutation(np.flatnonzero(sizes))[: count - 1], sizes.argmax())
        users = np.array([bundle.user_index.get(interactions.user_ids[user], -1) for user in chosen])
    windows = windows_before(histories, histories.offsets[chosen + 1], chosen, bundle.max_history)
    inputs = {"item_index": windows.items, "event_time": windows.times, "position": windows.lengths[:, None] - 1}
    if bundle.encoder.uses_user_index:
        inputs["user_index"] = users.astype(np.int64)
    return inputs


def _lengths_and_positions(inputs: Arrays) -> list[Arrays]:
    """Return the histories as one batch, as a single row, cut to one event, and with all positions requested."""
    length = inputs["item_index"].shape[1]
    every = {**inputs, "position": np.tile(np.arange(length), (len(inputs["item_index"]), 1))}
    full_row = {name: array[-1:] for name, array in every.items()}
    first = {name: array[:, :1] if array.ndim == 2 else array for name, array in inputs.items()}
    first["position"] = np.zeros_like(inputs["position"])
    return [inputs, full_row, first]


def _server_files(template: Path) -> dict[str, Path]:
    files = {
        f"{INFERENCE_SERVER_MODEL}/{path.relative_to(template).as_posix()}": path
        for path in sorted(template.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    if not files:
        raise ExportError(f"{template} holds no files; it is the inference server's model folder template")
    return files


def _named(files: dict[str, Path], model_version: str, scratch: Path) -> dict[str, Path]:
    for name in [name for name in files if name.endswith(".pbtxt")]:
        named = scratch / name.replace("/", "-")
        stanza = f'parameters {{ key: "model_version" value: {{ string_value: "{model_version}" }} }}\n'
        named.write_text(files[name].read_text(encoding="utf-8") + stanza, encoding="utf-8")
        files[name] = named
    return files
