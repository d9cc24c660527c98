"""The mixture-of-logits head: the reference's formula, a user component that may be absent, and dropouts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from services.algorithms.bundles.model_manifest import EncoderShape, HeadShape
from services.algorithms.ops.mol_scores.reference import mol_scores_reference
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.offline.training.models.hstu import unit_rows
from services.offline.training.models.mol import DotHead, Dropouts, MolHead, PairGateMlp
from services.offline.training.models.sequential import SequentialModel

SHAPE = HeadShape(
    kind="mol",
    num_query_components=3,
    num_item_components=2,
    component_width=4,
    tau=0.05,
    gate_hidden=5,
    query_hidden=7,
)


def head_of(**dropouts: float) -> MolHead:
    return MolHead(SHAPE, 12, num_users=4, dropouts=Dropouts(**dropouts))


@torch.no_grad()
def test_scores_of_pairs_equal_the_reference_op() -> None:
    head = head_of().eval()
    query = head.query_states(torch.randn(6, 12), torch.tensor([0, 1, 2, 3, -1, -1]))
    item = head.item_states(torch.randn(5, 12))
    gate = PairGate(**{name: value.numpy() for name, value in head.pair_gate.tensors().items()})
    expected = mol_scores_reference(
        QueryStates(components=query[0].numpy(), gate=query[1].numpy()),
        ItemStates(components=item[0].numpy(), gate=item[1].numpy()),
        gate,
    )
    for column in range(5):
        same_item = (item[0][column].expand(6, -1, -1), item[1][column].expand(6, -1))
        scores, weights = head.score_pairs(query, same_item)
        np.testing.assert_allclose(scores.numpy(), expected[:, column].numpy(), atol=1e-6)
        np.testing.assert_allclose(weights.sum(dim=1).numpy(), 1, atol=1e-6)
        assert scores.abs().max() <= 1


@torch.no_grad()
def test_components_have_length_one_and_an_unknown_users_is_zero() -> None:
    components, _ = head_of().eval().query_states(torch.randn(3, 12), torch.tensor([2, -1, 0]))
    np.testing.assert_allclose(components.norm(dim=-1).numpy(), [[1, 1, 1], [1, 1, 0], [1, 1, 1]], atol=1e-6)


@torch.no_grad()
def test_training_drops_the_user_component_whole_and_at_the_given_rate() -> None:
    head = head_of(user=0.5).train()
    components, _ = head.query_states(torch.randn(4000, 12), torch.randint(0, 4, (4000,)))
    lengths = components[:, -1].norm(dim=-1)
    assert ((lengths < 1e-6) | ((lengths - 1).abs() < 1e-5)).all()
    assert lengths.mean().item() == pytest.approx(0.5, abs=0.05)


@torch.no_grad()
def test_training_may_drop_elements_of_the_user_component_which_stays_of_length_one() -> None:
    head = head_of(user_element=0.5).train()
    components, _ = head.query_states(torch.randn(4000, 12), torch.randint(0, 4, (4000,)))
    user = components[:, -1]
    assert (user == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    lengths = user.norm(dim=-1)
    assert ((lengths - 1).abs() < 1e-5).float().mean().item() == pytest.approx(15 / 16, abs=0.02)


@torch.no_grad()
def test_item_dropout_leaves_the_items_gate_alone() -> None:
    head = head_of(item=0.5).train()
    embedded = torch.randn(50, 12)
    components, gate = head.item_states(embedded)
    serving = head.eval().item_states(embedded)
    assert not torch.equal(components, serving[0])
    assert torch.equal(gate, serving[1])


@torch.no_grad()
def test_pair_dropout_drops_cosines_that_the_network_reads_but_not_those_it_weighs() -> None:
    head = head_of(pair=0.5).train()
    query = head.query_states(torch.randn(50, 12), torch.full((50,), -1))
    item = head.item_states(torch.randn(50, 12))
    scores, weights = head.score_pairs(query, item)
    cosines = (query[0] @ item[0].transpose(1, 2)).flatten(1)
    torch.testing.assert_close(scores, (weights * cosines).sum(dim=1))
    _, serving = head.eval().score_pairs(query, item)
    assert (weights - serving).abs().max() > 1e-3


@torch.no_grad()
def test_dropped_pair_weights_leave_the_others_summing_to_one() -> None:
    head = head_of(gate=0.4).train()
    query = head.query_states(torch.randn(2000, 12), torch.full((2000,), -1))
    item = head.item_states(torch.randn(2000, 12))
    _, weights = head.score_pairs(query, item)
    sums = weights.sum(dim=1)
    assert ((sums - 1).abs() < 1e-5).float().mean() > 0.98  # all six dropped: 0.4 % of rows
    assert (weights == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)


def test_the_trained_gate_weight_reads_logits_and_begins_as_xavier_normal() -> None:
    gate = PairGateMlp(32, 128, tau=0.05)
    for weight in (gate.logit_weight, gate.out_weight):
        assert weight.std().item() == pytest.approx((2 / (32 + 128)) ** 0.5, rel=0.05)
    assert not gate.hidden_bias.any()
    assert not gate.out_bias.any()
    cosines = torch.rand(7, 32) * 2 - 1
    of_logits = torch.nn.functional.silu(cosines / 0.05 @ gate.logit_weight.T) @ gate.out_weight.T
    np.testing.assert_allclose(gate(cosines).detach().numpy(), of_logits.detach().numpy(), rtol=1e-5, atol=1e-5)
    assert "logit_weight" in dict(gate.named_parameters()), "what the optimizer steps"


def test_one_adam_step_moves_the_weight_of_cosines_by_the_rate_over_tau() -> None:
    gate = PairGateMlp(4, 3, tau=0.05)
    before = gate.hidden_weight.detach().clone()
    optimizer = torch.optim.Adam(gate.parameters(), lr=1e-3)
    gate(torch.rand(5, 4)).square().sum().backward()
    optimizer.step()
    moved = (gate.hidden_weight.detach() - before).abs()
    np.testing.assert_allclose(moved.numpy(), 1e-3 / 0.05, rtol=1e-3)


def test_a_dot_head_is_the_cosine() -> None:
    shape = HeadShape(kind="dot", num_query_components=1, num_item_components=1, component_width=12, tau=0.05)
    head = DotHead(shape, 12)
    encoded = torch.randn(3, 12)
    query, gate = head.query_states(encoded)
    assert gate is None
    np.testing.assert_allclose(
        (query.squeeze(1) @ head.item_states(encoded)[0].squeeze(1).T).diagonal().numpy(), 1, atol=1e-6
    )
    assert not list(head.parameters())


def test_a_dot_head_of_another_width_projects_both_sides() -> None:
    shape = HeadShape(kind="dot", num_query_components=1, num_item_components=1, component_width=12, tau=0.05)
    head = DotHead(shape, 10)
    encoded = torch.randn(3, 10)
    query, item = head.query_states(encoded)[0], head.item_states(encoded)[0]
    assert query.shape == item.shape == (3, 1, 12)
    torch.testing.assert_close(query.norm(dim=-1), torch.ones(3, 1))
    expected = functional.normalize(encoded @ head.item.weight.t(), dim=-1)
    torch.testing.assert_close(item.squeeze(1), expected)


def test_a_user_component_and_the_number_of_users_must_agree() -> None:
    encoder = EncoderShape(
        kind="hstu", num_blocks=1, num_heads=1, width=12, d_qk=4, d_v=4, max_history=8, num_time_buckets=8
    )
    with pytest.raises(ValueError, match="num_users=3; uses_user_index=False"):
        SequentialModel(encoder, SHAPE, num_items=5, num_users=3)


def test_item_states_of_the_model_are_in_dense_order_and_match_its_head() -> None:
    encoder = EncoderShape(
        kind="hstu", num_blocks=1, num_heads=1, width=12, d_qk=4, d_v=4, max_history=8, num_time_buckets=8
    )
    model = SequentialModel(encoder, SHAPE, num_items=5).eval()
    states = model.all_item_states()
    single = model.head.item_states(model.item_embedding(torch.tensor([3])))
    np.testing.assert_allclose(states.components[3], single[0][0].detach().numpy(), atol=1e-6)
    assert states.gate is not None
    np.testing.assert_allclose(states.gate[3], single[1][0].detach().numpy(), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(("noise", "twins"), [(0.0, 1), (0.3, 0)])
def test_no_two_query_components_start_the_same_with_noise(noise: float, twins: int) -> None:
    head = MolHead(replace(SHAPE, query_hidden=0), 12, start_noise=noise)
    of_queries, of_items = (torch.split(side.weight, 4) for side in (head.query, head.item))
    pairs = ((0, 1), (0, 2), (1, 2))
    assert sum(torch.equal(of_queries[one], of_queries[other]) for one, other in pairs) == twins
    # Rows of all components are near those of one orthogonal map.
    for component in (*of_queries, *of_items) if noise else ():
        cosines = functional.cosine_similarity(component, of_items[0])
        assert (cosines > 0.7).all()


def test_rows_of_length_one_and_their_gradients_are_autograds() -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 3, 7, dtype=torch.float64)
    rows[1, 2] = 0
    rows.requires_grad_()
    plain = functional.normalize(rows, dim=-1, eps=1e-6)
    torch.testing.assert_close(unit_rows(rows), plain, rtol=0, atol=0)
    weights = torch.randn_like(rows)
    found, wanted = (torch.autograd.grad((unit * weights).sum(), rows)[0] for unit in (unit_rows(rows), plain))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(unit_rows(rows), plain, rtol=0, atol=0)
