"""Model folders in the usual format with random weights: BERT's, small enough for any test."""

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
