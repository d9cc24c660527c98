"""Encoders: causal, indifferent to padding, and HSTU equal to a transcription of its formula in plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from services.algorithms.bundles.model_manifest import EncoderShape, HeadShape
from services.offline.training.models.hstu import HstuBlock, HstuEncoder, Past, time_buckets
from services.offline.training.models.sequential import PADDING, SequentialModel

HSTU = EncoderShape(
    kind="hstu", num_blocks=2, num_heads=2, width=12, d_qk=5, d_v=7, max_history=16, num_time_buckets=64
)
SASREC = replace(HSTU, kind="sasrec", num_time_buckets=0)
HEAD = HeadShape(kind="mol", num_query_components=3, num_item_components=2, component_width=4, tau=0.05, gate_hidden=5)
KINDS = pytest.mark.parametrize("encoder", [HSTU, SASREC], ids=["hstu", "sasrec"])


def model_of(encoder: EncoderShape) -> SequentialModel:
    model = SequentialModel(encoder, HEAD, num_items=20).eval()
    # Weights as large as training makes them, so that a leak would show.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def histories(num_rows: int = 3, length: int = 15) -> tuple[Tensor, Tensor]:
    items = torch.randint(0, 20, (num_rows, length))
    times = torch.randint(9 * 10**8, 10**9, (num_rows, length)).sort(dim=1).values
    return items, times


@KINDS
@torch.no_grad()
def test_future_events_never_change_an_earlier_state(encoder: EncoderShape) -> None:
    model, (items, times) = model_of(encoder), histories()
    before = model.encode(items, times)
    for position in range(1, 15):
        changed_items, changed_times = items.clone(), times.clone()
        changed_items[:, position:] = (changed_items[:, position:] + 7) % 20
        changed_times[:, position:] += 12345
        after = model.encode(changed_items, changed_times)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
        assert (after[:, position] - before[:, position]).abs().max() > 1e-3


@KINDS
@torch.no_grad()
def test_padding_and_neighbours_in_the_batch_change_nothing(encoder: EncoderShape) -> None:
    model, (items, times) = model_of(encoder), histories()
    batch_items, batch_times = items.clone(), times.clone()
    batch_items[0, 6:], batch_times[0, 6:] = PADDING, batch_times[0, 5]
    together = model.encode(batch_items, batch_times)
    alone = model.encode(items[:1, :6], times[:1, :6])
    torch.testing.assert_close(together[:1, :6], alone, rtol=0, atol=1e-6)


@torch.no_grad()
def test_states_do_not_depend_on_when_a_history_happened_but_on_the_time_between_its_events() -> None:
    model, (items, times) = model_of(HSTU), histories()
    torch.testing.assert_close(model.encode(items, times + 86_400 * 365), model.encode(items, times))
    slower = times[:, :1] + (times - times[:, :1]) * 5
    assert (model.encode(items, slower) - model.encode(items, times)).abs().max() > 1e-3


@torch.no_grad()
def test_a_state_does_not_depend_on_its_place_in_the_window() -> None:
    """No absolute positions: events that say nothing (zero rows) can go without shifting anything."""
    model, (items, times) = model_of(replace(HSTU, num_blocks=1)), histories()
    embedded = model.item_embedding(items)
    embedded[:, :4] = 0
    with_zeros = model.encoder(embedded, times)[:, 4:]
    without = model.encoder(embedded[:, 4:], times[:, 4:])
    torch.testing.assert_close(with_zeros, without, rtol=0, atol=1e-6)


def test_a_history_longer_than_the_encoder_allows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="history length=17; allowed: at most 16"):
        model_of(HSTU).encode(*histories(length=17))


def test_the_hstu_block_equals_its_formula_in_plain_loops() -> None:
    length, heads, d_qk, d_v, width = 7, 2, 5, 7, 12
    block = HstuBlock(HSTU, dropout=0.0).double().eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x, times = torch.randn(1, length, width, dtype=torch.float64), histories(1, length)[1]
    order = torch.arange(length)
    distance = (order[:, None] - order[None, :]).clamp(min=0)
    causal = (order[None, :] <= order[:, None]).double() / HSTU.max_history
    found = block(x, distance, time_buckets(times, 64), causal)[0].detach().numpy()

    weights = {name: value.detach().numpy() for name, value in block.named_parameters()}

    def norm(row: np.ndarray) -> np.ndarray:
        return (row - row.mean()) / math.sqrt(row.var() + 1e-5)

    def silu(value: np.ndarray) -> np.ndarray:
        return value / (1 + np.exp(-value))

    rows, seconds = x[0].numpy(), times[0].tolist()
    for i in range(length):
        attended = np.zeros((heads, d_v))
        for j in range(i + 1):
            u, v, q, k = np.split(
                np.stack([silu(norm(rows[at]) @ weights["uvqk"]) for at in (i, j)]),
                np.cumsum([heads * d_v, heads * d_v, heads * d_qk]),
                axis=1,
            )
            bucket = min(63, int(math.log(max(1, abs(seconds[i] - seconds[j]))) / 0.301))
            for head in range(heads):
                score = q[0].reshape(heads, d_qk)[head] @ k[1].reshape(heads, d_qk)[head]
                score += weights["time_bias"][bucket] + weights["position_bias"][i - j]
                attended[head] += silu(score) / HSTU.max_history * v[1].reshape(heads, d_v)[head]
        gated = norm(attended.reshape(-1)) * u[0]
        expected = rows[i] + weights["output.weight"] @ gated + weights["output.bias"]
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-9)


def test_time_buckets_are_exact_for_every_distance_that_could_be_near_an_edge() -> None:
    edges = [math.exp(0.301 * bucket) for bucket in range(1, 64)]
    seconds = sorted({max(0, math.floor(edge) + shift) for edge in edges for shift in (-1, 0, 1)})
    times = torch.tensor([[0, second] for second in seconds])
    found = time_buckets(times, 64)[:, 1, 0].tolist()
    # An integer counts edges at or below it; no integer comes closer to an edge than float64 can tell.
    assert found == [min(63, sum(edge <= second for edge in edges)) for second in seconds]
    assert time_buckets(times, 64)[:, 0, 1].tolist() == found


def test_counted_gradients_of_the_time_bias_equal_autograd() -> None:
    from services.offline.training.models.hstu import _lookup

    table, buckets = torch.randn(6, requires_grad=True), torch.randint(0, 6, (3, 4, 4))
    weight = torch.randn(3, 4, 4)
    (ours,) = torch.autograd.grad((_lookup(table, buckets) * weight).sum(), table)
    (theirs,) = torch.autograd.grad((table[buckets] * weight).sum(), table)
    torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_new_events_alone_equal_whole_histories_with_the_published_norms() -> None:
    torch.manual_seed(0)
    encoder = HstuEncoder(replace(HSTU, norm_epsilon=1e-6, output_norm="layer")).double().eval()
    embedded = torch.randn(5, 12, dtype=torch.float64) * 0.01
    times = torch.tensor([0, 5, 60, 60, 4000]) + 10**9
    none = [torch.zeros(2, 0, width, dtype=torch.float64) for width in (5, 7) for _ in range(2)]
    past = Past(time=times[:0], place=times[:0], keys=none[:2], values=none[2:])
    states, _, _ = encoder.step(embedded, times, torch.arange(5), past)
    torch.testing.assert_close(states, encoder(embedded[None], times[None])[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(states.mean(dim=1), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)
