"""Model folders in the usual format with random weights: BERT's and T5's, small enough for any test."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.unit.text.text_scene import WORDS

BERT = {
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "hidden_act": "gelu",
}
T5 = {
    "model_type": "t5",
    "vocab_size": len(WORDS),
    "d_model": 12,
    "num_layers": 2,
    "num_heads": 3,
    "d_kv": 5,
    "d_ff": 20,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}


def write_folder(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    save_file(weights, folder / "model.safetensors")
    return folder


def bert_weights(config: dict[str, object] = BERT, seed: int = 0) -> dict[str, torch.Tensor]:
    width, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (int(str(config["vocab_size"])), width),
        "embeddings.position_embeddings.weight": (int(str(config["max_position_embeddings"])), width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
        # Published folders carry more than the encoder.
        "pooler.dense.weight": (width, width),
    }
    for layer in range(int(str(config["num_hidden_layers"]))):
        name = f"encoder.layer.{layer}."
        for part, (rows, columns) in {
            "attention.self.query": (width, width),
            "attention.self.key": (width, width),
            "attention.self.value": (width, width),
            "attention.output.dense": (width, width),
            "intermediate.dense": (inner, width),
            "output.dense": (width, inner),
        }.items():
            shapes |= {f"{name}{part}.weight": (rows, columns), f"{name}{part}.bias": (rows,)}
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{name}{part}.weight": (width,), f"{name}{part}.bias": (width,)}
    return _random(shapes, seed)


def t5_weights(config: dict[str, object] = T5, seed: int = 0) -> dict[str, torch.Tensor]:
    width, inner = int(str(config["d_model"])), int(str(config["d_ff"]))
    heads = int(str(config["num_heads"]))
    joined = heads * int(str(config["d_kv"]))
    shapes: dict[str, tuple[int, ...]] = {
        "shared.weight": (int(str(config["vocab_size"])), width),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (
            int(str(config["relative_attention_num_buckets"])),
            heads,
        ),
        "encoder.final_layer_norm.weight": (width,),
        "decoder.final_layer_norm.weight": (width,),
    }
    gated = str(config["feed_forward_proj"]).startswith("gated-")
    for layer in range(int(str(config["num_layers"]))):
        name = f"encoder.block.{layer}.layer."
        shapes |= {f"{name}0.SelfAttention.{part}.weight": (joined, width) for part in ("q", "k", "v")}
        shapes |= {
            f"{name}0.SelfAttention.o.weight": (width, joined),
            f"{name}0.layer_norm.weight": (width,),
            f"{name}1.layer_norm.weight": (width,),
            f"{name}1.DenseReluDense.wo.weight": (width, inner),
        }
        inner_names = ("wi_0", "wi_1") if gated else ("wi",)
        shapes |= {f"{name}1.DenseReluDense.{part}.weight": (inner, width) for part in inner_names}
    return _random(shapes, seed)


def bert_folder(folder: Path, seed: int = 0) -> Path:
    return write_folder(folder, dict(BERT), bert_weights(seed=seed))


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        norm = name.endswith(("LayerNorm.weight", "layer_norm.weight"))
        made[name] = 1 + 0.1 * noise if norm else 0.4 * noise
    return made
