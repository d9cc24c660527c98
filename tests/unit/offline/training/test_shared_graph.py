"""Two encoders over the same lower layers become one graph that answers as both; others stay two."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from services.algorithms.models.text_bodies import BertBody, BodyShape
from services.offline.training.int8_graphs import write_shared
from services.offline.training.models.phrase_nar import PhraseEncoder
from services.offline.training.onnx_graphs import session, write_text_graph

MAX_TOKENS, POSITIONS, NUM_PIECES = 16, 5, 40


class Narrow(nn.Module):
    """Reads a query's own tokens with some encoder's lower layers, then with a row of its own before them."""

    def __init__(self, lower: PhraseEncoder, upper: PhraseEncoder) -> None:
        super().__init__()
        self.lower, self.upper = copy.deepcopy(lower), copy.deepcopy(upper)
        self.row = nn.Parameter(torch.randn(1, lower.shape.width))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.lower.lower(input_ids, attention_mask)
        hidden = torch.cat([self.row.expand(hidden.shape[0], -1, -1), hidden], dim=1)
        mask = torch.cat([attention_mask.new_ones((attention_mask.shape[0], 1)), attention_mask], dim=1)
        body = self.upper.body
        return body.run(hidden, mask != 0, body.shape.layers - 1, body.shape.layers)[:, :2]


def encoder(seed: int) -> PhraseEncoder:
    torch.manual_seed(seed)
    shape = BodyShape(
        vocabulary=NUM_PIECES, width=16, layers=3, heads=2, inner=32, epsilon=1e-12, max_positions=MAX_TOKENS
    )
    built = PhraseEncoder(BertBody(shape), positions=POSITIONS, max_tokens=MAX_TOKENS, num_upper=1)
    for weight in built.parameters():
        nn.init.normal_(weight, std=0.3)
    return built.eval()


def narrow_graph(folder: Path, narrow: Narrow) -> Path:
    write_text_graph(narrow, folder / "narrow.onnx", output="found", max_tokens=MAX_TOKENS)
    return folder / "narrow.onnx"


def queries(lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"input_ids": rng.integers(1, NUM_PIECES, (1, length)), "attention_mask": np.ones((1, length), dtype=np.int64)}
        for length in lengths
    ]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Those of encoder(0), and of a narrow one over its lower layers."""
    folder, wide = tmp_path_factory.mktemp("graphs"), encoder(0)
    write_text_graph(wide, folder / "wide.onnx", output="x", max_tokens=MAX_TOKENS)
    return folder / "wide.onnx", narrow_graph(folder, Narrow(wide, encoder(1)))


def test_one_graph_answers_as_both_and_reads_the_common_layers_once(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    wide, narrow = graphs
    path = tmp_path / "shared.onnx"
    assert write_shared(("wide", wide), ("narrow", narrow), path, queries([2, 4, MAX_TOKENS]))

    together = session(path)
    # Shorter than the positions, as many as them, longer; and several at once, one of them padded.
    padded = queries([9])[0]
    padded = {name: np.concatenate([array, array]) for name, array in padded.items()}
    padded["attention_mask"][1, 3:] = 0
    for feeds in (*queries([2, 3, 1 + POSITIONS, 11, MAX_TOKENS]), padded):
        for name, graph in (("wide", wide), ("narrow", narrow)):
            (expected,) = session(graph).run(None, feeds)
            np.testing.assert_allclose(together.run([name], feeds)[0], expected, atol=1e-5)
    products = [sum(node.op_type == "MatMul" for node in onnx.load(one).graph.node) for one in (wide, narrow, path)]
    assert products[2] < products[0] + products[1] - products[0] // 2


def test_encoders_with_other_lower_layers_stay_two(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    wide, narrow = graphs[0], narrow_graph(tmp_path, Narrow(encoder(2), encoder(1)))
    assert not write_shared(("wide", wide), ("narrow", narrow), tmp_path / "shared.onnx", queries([2, 8]))
    assert not (tmp_path / "shared.onnx").exists()


def test_equal_embeddings_alone_are_not_worth_a_graph(graphs: tuple[Path, Path], tmp_path: Path) -> None:
    first, other = encoder(0), encoder(2)
    for name in ("words", "positions", "norm"):
        getattr(other.body, name).load_state_dict(getattr(first.body, name).state_dict())
    other.body.segment.data.copy_(first.body.segment.data)
    wide, narrow = graphs[0], narrow_graph(tmp_path, Narrow(other, encoder(1)))
    assert not write_shared(("wide", wide), ("narrow", narrow), tmp_path / "shared.onnx", queries([2, 8]))
