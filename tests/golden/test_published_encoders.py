"""HSTU and SASRec give the published implementation's values; where HSTU differs by design, the difference is shown."""

import pytest
import torch
from published_values import Values, close, filled, published

from services.algorithms.bundles.model_manifest import EncoderShape
from services.offline.training.models.hstu import HstuEncoder, time_buckets
from services.offline.training.models.sasrec import SasRecEncoder

LENGTHS = (8, 5)


def hstu_with(values: Values, blocks: int) -> HstuEncoder:
    """Our encoder in float64 with the published weights, width 6, two heads, histories of 8."""
    shape = EncoderShape(
        kind="hstu",
        num_blocks=blocks,
        num_heads=2,
        width=6,
        d_qk=3,
        d_v=4,
        max_history=8,
        num_time_buckets=129,
        norm_epsilon=1e-6,
        output_norm="layer",
    )
    encoder = HstuEncoder(shape).double()
    for number, block in enumerate(encoder.blocks):
        of = {key.removeprefix(f"block{number}_"): value for key, value in values.items() if f"block{number}_" in key}
        filled(block.uvqk, of["uvqk"])
        filled(block.output.weight, of["out_weight"])
        filled(block.output.bias, of["out_bias"])
        filled(block.time_bias, of["time"])
        # Theirs has 2 L - 1 entries by j - i + L - 1; causal attention reads those up to the middle.
        filled(block.position_bias, of["position"][:8].flip(0))
        assert len(list(block.parameters())) == len(of)
    return encoder.eval()


@pytest.mark.parametrize("blocks", [1, 2])
@torch.no_grad()
def test_hstu_blocks_with_the_published_time_buckets(blocks: int) -> None:
    values = published(f"hstu_{blocks}_blocks")
    encoder = hstu_with(values, blocks)
    order = torch.arange(8)
    distance = (order[:, None] - order).clamp(min=0)
    causal = (order <= order[:, None]).double() / 8
    x = values["x"]
    for block in encoder.blocks:
        x = block(x, distance, values["buckets"], causal)
    for row, length in enumerate(LENGTHS):
        close(x[row, :length], values["output"][row, :length])


@pytest.mark.parametrize("blocks", [1, 2])
@torch.no_grad()
def test_the_whole_hstu_encoder_where_all_times_are_one(blocks: int) -> None:
    """Behind absolute positions of zero; the input is small, so that a norm's epsilon shows."""
    values = published(f"hstu_{blocks}_blocks")
    encoded = hstu_with(values, blocks)(values["embedded"], torch.full((2, 8), 10**9))
    for row, length in enumerate(LENGTHS):
        close(encoded[row, :length], values["encoded"][row, :length])


def test_our_time_bias_is_the_published_one_of_the_event_before() -> None:
    """Theirs takes the time of the next event, which serving does not know; ours takes the event's own."""
    values = published("hstu_1_blocks")
    ours = time_buckets(values["times"], 129)
    for row, length in enumerate(LENGTHS):
        lower = torch.ones(length, length).tril(-1).bool()
        published_before = values["buckets"].roll(1, dims=1)
        assert torch.equal(ours[row, :length, :length][lower], published_before[row, :length, :length][lower])
        assert (values["buckets"][row, :length, :length] != ours[row, :length, :length]).any()


def test_time_buckets_of_given_gaps() -> None:
    values = published("time_buckets")
    gaps = values["elapsed"]
    times = torch.stack([torch.zeros_like(gaps), gaps], dim=1)
    assert torch.equal(time_buckets(times, 129)[:, 1, 0], values["bucket"])


@torch.no_grad()
def test_the_whole_sasrec_encoder() -> None:
    values = published("sasrec_2_blocks")
    shape = EncoderShape(
        kind="sasrec",
        num_blocks=2,
        num_heads=2,
        width=6,
        d_qk=3,
        d_v=3,
        max_history=8,
        norm_epsilon=1e-8,
        output_norm="layer",
        residual_of_norm=True,
    )
    encoder = SasRecEncoder(shape).double().eval()
    filled(encoder.positions, values["positions"])
    names = {
        "qkv.weight": "in_weight",
        "qkv.bias": "in_bias",
        "output.weight": "out_weight",
        "output.bias": "out_bias",
        "inner.weight": "inner_weight",
        "inner.bias": "inner_bias",
        "outer.weight": "outer_weight",
        "outer.bias": "outer_bias",
    }
    for number, block in enumerate(encoder.blocks):
        parameters = dict(block.named_parameters())
        assert parameters.keys() == names.keys()
        for name, theirs in names.items():
            filled(parameters[name], values[f"block{number}_{theirs}"])
    encoded = encoder(values["embedded"], torch.zeros(2, 8, dtype=torch.int64))
    for row, length in enumerate(LENGTHS):
        close(encoded[row, :length], values["encoded"][row, :length])
