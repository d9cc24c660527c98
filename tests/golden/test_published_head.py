"""The mixture's head, its losses and its top-k classes give the published implementation's values."""

import numpy as np
import pytest
import torch
from published_values import close, head_with, pair_gate_of, published

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.indexes.combined_top_k import CombinedTopK
from services.algorithms.indexes.top_k_avg import TopKAvg
from services.algorithms.indexes.top_k_per_embedding import TopKPerEmbedding
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.training.loss import mutual_information
from services.offline.training.mol_sampled_softmax import GateWeights, Negatives, States, mol_sampled_softmax


@pytest.mark.parametrize(("name", "activation"), [("swiglu", "silu"), ("geglu", "gelu"), ("linear", "silu")])
@torch.no_grad()
def test_components_gates_and_scores_in_float64(name: str, activation: str) -> None:
    values = published(f"mol_head_{name}")
    head = head_with(values, activation=activation)
    tau = values["tau"].item()
    query = head.query_states(values["query"], values["user"] if "users" in values else None)
    item = head.item_states(values["item"])
    close(query[0], values["query_components"])
    close(item[0], values["item_components"])
    close(query[1], values["query_gate"])
    close(item[1], values["item_gate"])
    for column in range(len(values["item"])):
        same_item = (item[0][column].expand(6, -1, -1), item[1][column].expand(6, -1))
        cosines = (query[0] @ same_item[0].transpose(1, 2)).flatten(1)
        scores, weights = head.score_pairs(query, same_item)
        close(head.pair_gate(cosines), values["pair_gate"][:, column])
        close(weights, values["pair_weights"][:, column])
        close(scores / tau, values["logits"][:, column])


@torch.no_grad()
def test_the_network_of_cosines_that_services_hold_scores_as_the_published_one_of_logits() -> None:
    values = published("mol_head_swiglu")
    numbers = {key: value.numpy() for key, value in values.items()}
    scores = mol_scores_reference(
        QueryStates(components=numbers["query_components"], gate=numbers["query_gate"]),
        ItemStates(components=numbers["item_components"], gate=numbers["item_gate"]),
        pair_gate_of(values),
    )
    # The network is in float32, as a bundle holds it.
    close(scores, values["tau"] * values["logits"])


@torch.no_grad()
def test_training_drops_user_elements_and_pair_weights_as_published() -> None:
    values = published("mol_head_training")
    head = head_with(values, user_element=0.5, gate=0.3).train()
    torch.manual_seed(7)  # the seed of the stored mask
    query = head.query_states(values["query"], values["user"])
    close(query[0], values["query_components"])
    torch.manual_seed(5)
    scores, weights = head.score_pairs(query, head.item_states(values["item"]))
    assert torch.equal(weights > 0, values["keep"] > 0), "another mask than the stored one was drawn"
    close(scores / values["tau"], values["logits"])
    close(mutual_information(weights), values["mi_loss"], 2e-5)  # theirs adds 1e-6 to each of 6 + 36 weights


def test_mutual_information_of_given_weights() -> None:
    values = published("mutual_information")
    close(mutual_information(values["weights"]), values["loss_eps_0"], 1e-12)
    # In training theirs adds 1e-6 within the logarithms: up to that much for each of two times P = 8 weights.
    close(mutual_information(values["weights"]), values["loss_eps_1e_6"], 1.6e-5)


def test_sampled_softmax_and_its_gradients() -> None:
    values = published("sampled_softmax")
    head = head_with(values).train()
    query, item = values["query"].requires_grad_(), values["item"].requires_grad_()
    queries, items = States(*head.query_states(query)), States(*head.item_states(item))
    positive, weights = head.score_pairs(
        queries, (items.components[values["positive"]], items.gate[values["positive"]])
    )
    network = head.pair_gate
    gate = GateWeights(network.hidden_weight, network.hidden_bias, network.out_weight, network.out_bias)
    # Each position has its own negatives; among them are its target, once and in all places.
    negatives = Negatives(values["negative"], values["positive"], 1)
    assert (values["negative"] == values["positive"][:, None]).all(dim=1).any()
    loss = mol_sampled_softmax(positive, queries, items, gate, negatives, tau=values["tau"].item()) / len(query)
    close(loss, values["loss"])
    wanted = (values["query_gradient"], values["item_gradient"], values["pair_w1_gradient"])
    for found, gradient in zip(torch.autograd.grad(loss, [query, item, network.logit_weight]), wanted, strict=True):
        close(found, gradient)
    close(mutual_information(weights), values["mi_loss"], 2e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("brute_force", {}),
        ("per_embedding", {"pool_size": 5}),
        ("average", {"pool_size": 12}),
        ("combined", {"pair_pool_size": 4, "average_pool_size": 4}),
    ],
)
def test_top_k_classes_find_the_published_items_and_scores(name: str, options: dict[str, int]) -> None:
    values = published("top_k")
    floats = {key: value.float().numpy() for key, value in values.items()}
    kinds = {
        "brute_force": BruteForce,
        "per_embedding": TopKPerEmbedding,
        "average": TopKAvg,
        "combined": CombinedTopK,
    }
    items = ItemStates(components=floats["item_components"], gate=floats["item_gate"])
    index = kinds[name](MolScorer(items, pair_gate_of(values)), **options)
    queries = QueryStates(components=floats["query_components"], gate=floats["query_gate"])
    wanted = values[f"{name}_ids"].numpy()
    answer = index.search(queries, wanted.shape[1])
    np.testing.assert_array_equal(values["ids"].numpy()[answer.item_indices], wanted)
    logits = values[f"{name}_logits"].numpy()
    # States are float32 in services; similarities, logits times tau.
    np.testing.assert_allclose(answer.scores, values["tau"].item() * logits, rtol=0, atol=1e-6)
