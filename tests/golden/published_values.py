"""Values of the published implementations, as `published/README.md` says they were made, and our modules filled so."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from services.algorithms.bundles.model_manifest import HeadShape
from services.algorithms.scoring.states import PairGate
from services.offline.training.models.mol import Dropouts, MolHead

Values = dict[str, Tensor]


def published(name: str) -> Values:
    """The arrays of one file as tensors: floats in float64."""
    with np.load(Path(__file__).parent / "published" / f"{name}.npz") as found:
        return {key: torch.from_numpy(np.array(found[key])) for key in found.files}


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found.detach().to(wanted.dtype), wanted, rtol=0, atol=tolerance)


def filled(parameter: Tensor, value: Tensor) -> None:
    assert parameter.shape == value.shape
    with torch.no_grad():
        parameter.copy_(value)


def head_with(values: Values, *, activation: str = "silu", **dropouts: float) -> MolHead:
    """Our head in float64 with the published weights of a file."""
    users = values.get("users")
    pairs, gate_hidden = values["pair_w2"].shape
    width, out = values["query"].shape[1], len(values["query_weight"])
    component_width = out // (2 if users is not None else 3)
    shape = HeadShape(
        kind="mol",
        num_query_components=3,
        num_item_components=pairs // 3,
        component_width=component_width,
        tau=values["tau"].item(),
        gate_hidden=gate_hidden,
        query_hidden=values["query_weight"].shape[1] if "glu_weight" in values else 0,
        query_activation=activation,
    )
    head = MolHead(
        shape, width, num_users=0 if users is None else len(users) - 1, dropouts=Dropouts(**dropouts)
    ).double()
    if "glu_weight" in values:
        # Theirs is (in, out) and its activated half comes first.
        hidden = shape.query_hidden
        first_last = torch.arange(2 * hidden).roll(hidden)
        filled(head.query.inner.weight, values["glu_weight"].T[first_last])
        filled(head.query.inner.bias, values["glu_bias"][0, first_last])
        filled(head.query.outer.weight, values["query_weight"])
    else:
        filled(head.query.weight, values["query_weight"])
    filled(head.item.weight, values["item_weight"])
    for name, gate in (("query_gate", head.query_gate), ("item_gate", head.item_gate)):
        fill_gate(gate, values, name)
    network = head.pair_gate
    filled(network.logit_weight, values["pair_w1"])
    filled(network.hidden_bias, values["pair_b1"])
    filled(network.out_weight, values["pair_w2"])
    filled(network.out_bias, values["pair_b2"])
    if users is not None:
        assert head.user is not None
        filled(head.user.weight, users[1:])  # theirs keeps row 0 for padding
    assert {name for name, _ in head.named_parameters()} == FILLED[users is not None, shape.query_hidden > 0]
    return head.eval()


def fill_gate(gate: nn.Sequential, values: Values, name: str) -> None:
    filled(gate[0].weight, values[f"{name}_w1"])
    filled(gate[0].bias, values[f"{name}_b1"])
    filled(gate[2].weight, values[f"{name}_w2"])


def pair_gate_of(values: Values) -> PairGate:
    """The network as services hold it, for cosines: the first layer over tau."""
    arrays = (values["pair_w1"] / values["tau"], values["pair_b1"], values["pair_w2"], values["pair_b2"])
    names = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
    return PairGate(**{name: array.float().numpy() for name, array in zip(names, arrays, strict=True)})


_GATES = {f"{side}_gate.{name}" for side in ("query", "item") for name in ("0.weight", "0.bias", "2.weight")}
_PAIRS = {f"pair_gate.{name}" for name in ("logit_weight", "hidden_bias", "out_weight", "out_bias")}
# A parameter that is not filled would stay random, and a new one would go unseen.
FILLED = {
    (users, glu): _GATES
    | _PAIRS
    | {"item.weight"}
    | ({"user.weight"} if users else set())
    | ({"query.inner.weight", "query.inner.bias", "query.outer.weight"} if glu else {"query.weight"})
    for users in (False, True)
    for glu in (False, True)
}
