"""Weights of models from before the gate lost its output biases and read logits: they load and give the same scores."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.algorithms.manifest import EncoderShape, HeadShape
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.states import QueryStates
from services.offline.training.models.sequential import SequentialModel

HEAD = HeadShape(
    kind="mol",
    num_query_components=3,
    num_item_components=2,
    component_width=4,
    tau=0.05,
    gate_hidden=5,
    query_hidden=7,
)


def encoder_of(kind: str) -> EncoderShape:
    """With the fields that a manifest had then: all later ones have their defaults."""
    buckets = 64 if kind == "hstu" else 0
    return EncoderShape(
        kind=kind,
        num_blocks=2,
        num_heads=2,
        width=8,
        d_qk=3,
        d_v=4,
        max_history=8,
        num_time_buckets=buckets,
        uses_user_index=True,
    )


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@torch.no_grad()
def test_older_weights_give_the_same_states_and_scores(kind: str) -> None:
    with np.load(Path(__file__).parent / "older" / f"{kind}.npz") as file:
        stored = {name: torch.from_numpy(np.array(file[name])) for name in file.files}
    model = SequentialModel(encoder_of(kind), HEAD, num_items=20, num_users=4)
    weights = {name.removeprefix("weights/"): value for name, value in stored.items() if name.startswith("weights/")}
    assert weights["head.query_gate.2.bias"].all()
    assert weights["head.item_gate.2.bias"].all()
    model.load_state_dict(weights)
    model.eval()
    components, gate = model.states_at(*(stored[name] for name in ("items", "times", "users", "positions")))
    items, network = model.all_item_states(), model.pair_gate()
    assert gate is not None
    assert network is not None
    for found, name in (
        (components, "components"),
        (gate, "gate"),
        (torch.from_numpy(items.components), "item_components"),
        (torch.from_numpy(items.gate), "item_gate"),
    ):
        torch.testing.assert_close(found, stored[name], rtol=0, atol=1e-6)
    # Multiplied by tau and divided by it again: one unit in the last place of a float32.
    np.testing.assert_allclose(network.hidden_weight, stored["hidden_weight"].numpy(), rtol=1.2e-7)
    queries = QueryStates(components=components.flatten(0, 1).numpy(), gate=gate.flatten(0, 1).numpy())
    scores = mol_scores_reference(queries, items, network)
    torch.testing.assert_close(scores, stored["scores"], rtol=0, atol=1e-6)


def test_a_new_model_has_no_output_biases_and_loads_into_one_that_had_them() -> None:
    new, older = (SequentialModel(encoder_of("hstu"), HEAD, num_items=20, num_users=4) for _ in range(2))
    assert not [name for name in new.state_dict() if name.endswith("gate.2.bias")]
    with_biases = new.state_dict() | {"head.item_gate.2.bias": torch.ones(6), "head.query_gate.2.bias": torch.ones(6)}
    older.load_state_dict(with_biases)
    assert older.state_dict().keys() == with_biases.keys()
    older.load_state_dict(new.state_dict())
    assert older.state_dict().keys() == new.state_dict().keys()
