"""Presets hold the published configurations, and models begin with the published spread of weights."""

from dataclasses import replace

import pytest
import torch
from published_values import published

from services.offline.training.models.hstu import HstuBlock, HstuEncoder
from services.offline.training.models.mol import Dropouts, MolHead
from services.offline.training.models.sasrec import SasRecEncoder
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.presets import TrainConfig, preset, with_dot_head, with_sasrec

# configs/<data set>/hstu-mol-*.gin, in the files' words; batches are per device there, and Books has two devices.
PUBLISHED = {
    "ml-1m": {
        "num_epochs": 101,
        "num_blocks": 8,
        "num_heads": 2,
        "dqk": 25,
        "dv": 25,
        "item_embedding_dim": 50,
        "dropout_rate": 0.2,
        "linear_dropout_rate": 0.2,
        "max_sequence_length": 200,
        "query_dot_product_groups": 8,
        "item_dot_product_groups": 4,
        "dot_product_dimension": 64,
        "query_nonlinearity": "swiglu",
        "uid_dropout_rate": 0.5,
        "gating_qi_dropout_rate": 0.0,
        "num_negatives": 128,
        "uid_embedding_l2_norm": 0.1,
    },
    "ml-20m": {
        "num_epochs": 151,
        "num_blocks": 16,
        "num_heads": 8,
        "dqk": 32,
        "dv": 32,
        "item_embedding_dim": 256,
        "dropout_rate": 0.2,
        "linear_dropout_rate": 0.2,
        "max_sequence_length": 200,
        "query_dot_product_groups": 8,
        "item_dot_product_groups": 4,
        "dot_product_dimension": 128,
        "query_nonlinearity": "swiglu",
        "uid_dropout_rate": 0.8,
        "gating_qi_dropout_rate": 0.1,
        "num_negatives": 128,
        "uid_embedding_l2_norm": 0.1,
    },
    "books": {
        "num_epochs": 201,
        "num_blocks": 16,
        "num_heads": 8,
        "dqk": 8,
        "dv": 8,
        "item_embedding_dim": 64,
        "dropout_rate": 0.5,
        "linear_dropout_rate": 0.5,
        # 50 in the file. A history's length is a multiple of 4 here (the window rule).
        "max_sequence_length": 52,
        "query_dot_product_groups": 8,
        "item_dot_product_groups": 8,
        "dot_product_dimension": 32,
        "query_nonlinearity": "geglu",
        "uid_dropout_rate": 0.0,
        "gating_qi_dropout_rate": 0.0,
        "num_negatives": 512,
        "uid_embedding_l2_norm": 0.0,
    },
}
# The same in all three files.
COMMON = {
    "query_hidden_dim": 512,
    "query_dropout_rate": 0.0,
    "item_hidden_dim": 0,  # -1 there
    "item_dropout_rate": 0.1,
    "temperature": 0.05,
    "softmax_dropout_rate": 0.2,
    "gating_hidden_dim": 128,
    "learning_rate": 1e-3,
    "weight_decay": 1e-3,
    "num_warmup_steps": 0,
    "batch": 128,
    "mi_loss": 0.001,
    "user_embedding_norm": "layer_norm",
    "epsilon": 1e-6,
}
# configs/<data set>/sasrec-*.gin: blocks, heads; weight decay 0, and a feed-forward layer as wide as the model.
PUBLISHED_SASREC = {"ml-1m": (2, 1), "ml-20m": (4, 4), "books": (4, 4)}
# configs/<data set>/hstu-sampled-softmax-*.gin.
PUBLISHED_DOT_WEIGHT_DECAY = {"ml-1m": 1e-3, "ml-20m": 0.0, "books": 0.0}


def in_the_files_words(config: TrainConfig) -> dict[str, object]:
    encoder, head, dropouts = config.encoder, config.head, config.dropouts
    return {
        "num_epochs": config.epochs,
        "num_blocks": encoder.num_blocks,
        "num_heads": encoder.num_heads,
        "dqk": encoder.d_qk,
        "dv": encoder.d_v,
        "item_embedding_dim": encoder.width,
        "dropout_rate": dropouts.encoder,
        "linear_dropout_rate": dropouts.encoder,
        "max_sequence_length": encoder.max_history,
        "query_dot_product_groups": head.num_query_components,
        "item_dot_product_groups": head.num_item_components,
        "dot_product_dimension": head.component_width,
        "query_nonlinearity": {"silu": "swiglu", "gelu": "geglu"}[head.query_activation],
        "uid_dropout_rate": dropouts.user,
        "gating_qi_dropout_rate": dropouts.pair,
        "num_negatives": config.num_negatives,
        "uid_embedding_l2_norm": config.user_norm_weight,
        "query_hidden_dim": head.query_hidden,
        "query_dropout_rate": 0.0,
        "item_hidden_dim": head.item_hidden,
        "item_dropout_rate": dropouts.item,
        "temperature": head.tau,
        "softmax_dropout_rate": dropouts.gate,
        "gating_hidden_dim": head.gate_hidden,
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "num_warmup_steps": config.warmup_fraction,
        "batch": config.batch_sequences,
        "mi_loss": config.mutual_information_weight,
        "user_embedding_norm": {"layer": "layer_norm", "length": "l2_norm"}[encoder.output_norm],
        "epsilon": encoder.norm_epsilon,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_configuration(name: str) -> None:
    config = preset(name)
    assert in_the_files_words(config) == PUBLISHED[name] | COMMON
    assert config.encoder.uses_user_index == (name != "books")
    assert config.final_rate_fraction == 1, "the published rate is constant"
    assert config.encoder.num_time_buckets == 128


@pytest.mark.parametrize("name", PUBLISHED)
def test_sasrec_has_the_published_depth_heads_and_weight_decay(name: str) -> None:
    for config in (
        with_sasrec(preset(name)),
        with_sasrec(with_dot_head(preset(name))),
        with_dot_head(with_sasrec(preset(name))),
    ):
        encoder = config.encoder
        assert (encoder.num_blocks, encoder.num_heads) == PUBLISHED_SASREC[name]
        assert encoder.d_qk * encoder.num_heads == encoder.d_v * encoder.num_heads == encoder.width
        assert config.weight_decay == 0
        assert encoder.residual_of_norm
        assert encoder.norm_epsilon == 1e-8
        assert encoder.output_norm == ("layer" if config.head.is_mixture else "length")


def test_quick_has_no_published_sasrec_and_keeps_its_own_depth() -> None:
    quick = preset("quick")
    sasrec = with_sasrec(quick)
    assert replace(sasrec.encoder, kind="hstu", num_time_buckets=64) == quick.encoder
    assert sasrec.weight_decay == quick.weight_decay


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_dot_baseline_has_the_published_weight_decay_norm_and_dropouts(name: str) -> None:
    config = with_dot_head(preset(name))
    assert config.weight_decay == PUBLISHED_DOT_WEIGHT_DECAY[name]
    assert config.encoder.output_norm == "length"
    assert config.dropouts == Dropouts(encoder=preset(name).dropouts.encoder)


def spread(parameter: torch.Tensor) -> tuple[float, float]:
    return parameter.detach().std(correction=0).item(), parameter.detach().abs().max().item()


def test_a_fresh_model_begins_with_the_published_spread() -> None:
    """Standard deviations at the shapes of MovieLens-1M; a small tensor's vary, so the tolerance follows its size."""
    torch.manual_seed(0)
    values = published("initial_spread")
    config = preset("ml-1m")
    model = SequentialModel(replace(config.encoder, num_blocks=1), config.head, num_items=3000, num_users=6040)
    head, encoder = model.head, model.encoder
    assert isinstance(head, MolHead)
    assert isinstance(encoder, HstuEncoder)
    sasrec = with_sasrec(config).encoder
    block, position = SasRecEncoder(sasrec).blocks[0], SasRecEncoder(sasrec).positions
    hstu_block = encoder.blocks[0]
    assert isinstance(hstu_block, HstuBlock)
    ours = {
        "hstu_glu_weight": head.query.inner.weight,
        "hstu_glu_bias": head.query.inner.bias,
        "hstu_query_weight": head.query.outer.weight,
        "hstu_item_weight": head.item.weight,
        "hstu_query_gate_w1": head.query_gate[0].weight,
        "hstu_query_gate_b1": head.query_gate[0].bias,
        "hstu_query_gate_w2": head.query_gate[2].weight,
        "hstu_item_gate_w1": head.item_gate[0].weight,
        "hstu_item_gate_b1": head.item_gate[0].bias,
        "hstu_item_gate_w2": head.item_gate[2].weight,
        "hstu_pair_w1": head.pair_gate.logit_weight,
        "hstu_pair_b1": head.pair_gate.hidden_bias,
        "hstu_pair_w2": head.pair_gate.out_weight,
        "hstu_pair_b2": head.pair_gate.out_bias,
        "hstu_users": head.user.weight,
        "hstu_item_embedding": model.item_embedding.weight,
        "hstu_uvqk": hstu_block.uvqk,
        "hstu_out_weight": hstu_block.output.weight,
        "hstu_out_bias": hstu_block.output.bias,
        "hstu_time": hstu_block.time_bias,
        "hstu_position": hstu_block.position_bias,
        "sasrec_positions": position,
        "sasrec_in_weight": block.qkv.weight,
        "sasrec_in_bias": block.qkv.bias,
        "sasrec_out_weight": block.output.weight,
        "sasrec_out_bias": block.output.bias,
        "sasrec_inner_weight": block.inner.weight,
        "sasrec_inner_bias": block.inner.bias,
        "sasrec_outer_weight": block.outer.weight,
    }
    for name, parameter in ours.items():
        deviation, largest = values[name].tolist()
        found, found_largest = spread(parameter)
        tolerance = 0.02 + 3 / parameter.numel() ** 0.5
        assert found == pytest.approx(deviation, rel=tolerance), name
        # Tells a normal from a uniform distribution of the same spread: uniform ends at 1.73 deviations.
        if parameter.numel() > 2000:
            assert (largest > 2.5 * deviation) == (found_largest > 2.5 * found), name
