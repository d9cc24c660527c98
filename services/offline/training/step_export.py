"""The encoder's step graph in ONNX: it encodes one history's new events, given cached keys and values (decision 014).

Inputs: item_index, event_time, place (S,), position (M,) counted from the first new event, past_time and past_place
(C,), each block i's keys_i (H, C, d_qk) and values_i (H, C, d_v), and user_index (1,) if the model has it. Outputs:
components (M, P_q, d), gate (M, P) for a mixture, and all blocks' new_keys (N H, S, d_qk) and new_values (N H, S,
d_v). S, C and M are dynamic.

Letters: S new events, C cached events, M positions wanted, H heads, N blocks, d_qk and d_v widths per head.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.algorithms.encoding.actions import STRIDE
from services.algorithms.encoding.history import window_start
from services.algorithms.encoding.incremental_encoding import IncrementalEncoder
from services.offline.training.models.hstu import HstuEncoder, Past
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.onnx_graphs import write_graph

_CHECKED_BYTES = 1 << 26


def can_step(model: SequentialModel) -> bool:
    """Whether the encoder can continue from cached keys and values."""
    return isinstance(model.encoder, HstuEncoder)


def write_step_onnx(model: SequentialModel, path: Path) -> None:
    """Write the step graph. Raises: ExportError if a package is missing."""
    sample, dynamic, inputs, outputs = _signature(model)
    write_graph(_StepGraph(model.eval()), sample, dynamic, path, inputs=inputs, outputs=outputs)


class _StepGraph(nn.Module):
    def __init__(self, model: SequentialModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        item_index: Tensor,
        event_time: Tensor,
        place: Tensor,
        position: Tensor,
        past_time: Tensor,
        past_place: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        user_index: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        past = Past(time=past_time, place=past_place, keys=keys, values=values)
        (components, gate), new_keys, new_values = self.model.step(
            item_index, event_time, place, user_index, position, past
        )
        states = (components,) if gate is None else (components, gate)
        return (*states, new_keys, new_values)


def _signature(model: SequentialModel) -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """Return example inputs, their dynamic axes, and the names of inputs and outputs in the graph's order."""
    shape = model.encoder_shape
    blocks = range(shape.num_blocks)
    # As in `export._example`, sizes differ and are neither 0 nor 1.
    new, wanted, kept_events = 5, 2, 7
    events, states, past = (torch.export.Dim(name) for name in ("events", "positions", "kept"))
    # Each input has an example and its dynamic axes.
    rows: dict[str, tuple[Any, Any]] = {
        "item_index": (torch.zeros(new, dtype=torch.int64), {0: events}),
        "event_time": (torch.arange(new), {0: events}),
        "place": (torch.arange(new), {0: events}),
        "position": (torch.zeros(wanted, dtype=torch.int64), {0: states}),
        "past_time": (torch.arange(kept_events), {0: past}),
        "past_place": (torch.arange(kept_events), {0: past}),
    }
    inputs = list(rows)
    for name, width in (("keys", shape.d_qk), ("values", shape.d_v)):
        arrays = [torch.zeros(shape.num_heads, kept_events, width) for _ in blocks]
        rows[name] = arrays, [{1: past} for _ in blocks]
        inputs += [f"{name}_{block}" for block in blocks]
    if shape.uses_user_index:
        rows["user_index"] = torch.zeros(1, dtype=torch.int64), {}
        inputs.append("user_index")
    outputs = ["components", "gate"] if model.head_shape.is_mixture else ["components"]
    sample, dynamic = ({name: row[part] for name, row in rows.items()} for part in (0, 1))
    return sample, dynamic, inputs, [*outputs, "new_keys", "new_values"]


@torch.no_grad()
def max_step_difference(model: SequentialModel, session: Any, *, seed: int = 0, histories: int = 4) -> float:
    """Return the largest absolute difference between the incremental and PyTorch's full computation.

    Random histories grow to 2.5 windows in steps of 1 to 7 events; sometimes an event inside is inserted or replaced.
    """
    shape, rng = model.encoder_shape, np.random.default_rng(seed)
    encoder = IncrementalEncoder(session, max_bytes=_CHECKED_BYTES)

    def some_event() -> int:
        row = int(rng.integers(0, len(model.item_embedding.weight)))
        return row + STRIDE * int(rng.integers(0, 1 + len(shape.actions))) if shape.actions else row

    users = torch.tensor([-1]) if shape.uses_user_index else None
    largest = 0.0
    for key in range(histories):
        events: list[tuple[int, int]] = []
        while len(events) < 5 * shape.max_history // 2:
            newest = events[-1][1] if events else 10**9
            for _ in range(int(rng.integers(1, 8))):
                newest += int(10 ** rng.uniform(0, 6))
                events.append((some_event(), newest))
            if rng.random() < 0.1:
                at = int(rng.integers(0, len(events) - 1))
                events[at : at + int(rng.integers(0, 2))] = [(some_event(), events[at][1])]
            window = np.array(events[window_start(len(events), shape.max_history) :])
            wanted = np.unique(rng.integers(max(0, len(window) - 3), len(window), 2))
            items, times = np.ascontiguousarray(window[:, 0]), np.ascontiguousarray(window[:, 1])
            found, _ = encoder.encode(key, items, times, -1, wanted)
            expected = model.states_at(
                torch.from_numpy(items)[None], torch.from_numpy(times)[None], users, torch.from_numpy(wanted)[None]
            )
            for name, tensor in zip(("components", "gate"), expected, strict=True):
                if tensor is not None:
                    largest = max(largest, float(np.abs(found[name] - tensor[0].numpy()).max()))
    return largest
