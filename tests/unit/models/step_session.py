"""The step graph's session in PyTorch: the same inputs and outputs as the exported file, without exporting one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.offline.training.models.hstu import Past
from services.offline.training.models.sequential import SequentialModel


@dataclass(frozen=True)
class Spec:
    name: str
    shape: list[Any]


class StepSession:
    """Counts what it encodes: `encoded` are the new events of each run."""

    def __init__(self, model: SequentialModel) -> None:
        self._model, self._shape = model, model.encoder_shape
        self.encoded: list[int] = []
        self.fails = False

    def get_inputs(self) -> list[Spec]:
        heads, blocks = self._shape.num_heads, range(self._shape.num_blocks)
        plain = ["item_index", "event_time", "place", "position", "past_time", "past_place"]
        plain += ["user_index"] if self._shape.uses_user_index else []
        keys = [Spec(f"keys_{block}", [heads, "kept", self._shape.d_qk]) for block in blocks]
        values = [Spec(f"values_{block}", [heads, "kept", self._shape.d_v]) for block in blocks]
        return [*(Spec(name, ["events"]) for name in plain), *keys, *values]

    def get_outputs(self) -> list[Spec]:
        head = self._model.head_shape
        components = Spec("components", ["positions", head.num_query_components, head.component_width])
        gate = Spec("gate", ["positions", head.num_pairs])
        return [components, gate, Spec("new_keys", []), Spec("new_values", [])]

    @torch.no_grad()
    def run(self, outputs: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        if self.fails:
            raise RuntimeError("failed as told")
        given = {name: torch.from_numpy(array) for name, array in feeds.items()}
        blocks = range(self._shape.num_blocks)
        past = Past(
            time=given["past_time"],
            place=given["past_place"],
            keys=[given[f"keys_{block}"] for block in blocks],
            values=[given[f"values_{block}"] for block in blocks],
        )
        self.encoded.append(len(given["item_index"]))
        (components, gate), keys, values = self._model.step(
            given["item_index"],
            given["event_time"],
            given["place"],
            given.get("user_index"),
            given["position"],
            past,
        )
        assert gate is not None
        assert outputs == [spec.name for spec in self.get_outputs()]
        return [tensor.numpy() for tensor in (components, gate, keys, values)]
