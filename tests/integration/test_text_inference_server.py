"""The text encoders on the real inference server: PyTorch's vectors, batches of any company, refusals alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from services.algorithms.text_bundle import TextBundle, load_text_bundle
from services.stack import Ports, Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# Random weights of the right form: what the server gives must be what PyTorch gives, whatever that is.
TINY_TEXT = """
import json, sys
from pathlib import Path
import numpy as np, torch
from services.offline.training.models.phrase_nar import PhraseEncoder, PhraseShape
from services.algorithms.models.text_bodies import BertBody, BodyShape
from services.offline.training.models.text_mol import TextMol
from services.algorithms.states import ItemStates
from services.algorithms.text_bundle import HeadShape, TextBundleWriter
from services.algorithms.word_pieces import WordPieces
from services.offline.training.onnx_graphs import write_text_graph
from services.offline.training.text_catalogue import QueryGraph
from services.offline.training.text_server import add_server_folders

words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "space", "movie", "##s", "cat", "dog", "a", "the", "!"]
folder, queries = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.manual_seed(0)
shape = BodyShape(vocabulary=len(words), width=32, layers=2, heads=4, inner=64,
                  epsilon=1e-12, max_positions=24)
head = HeadShape(kind="mol", num_query_components=3, num_item_components=2, component_width=32, tau=0.05, gate_hidden=4)
mol = TextMol(BertBody(shape), head, joined=1, max_tokens=24).eval()
phrases = PhraseEncoder(PhraseShape(positions=4, max_tokens=24, width=32, inner_width=64, num_layers=2, num_heads=4,
                                    num_pieces=len(words)), num_upper=1).eval()
write_text_graph(QueryGraph(mol), folder / "text.onnx", output="components", max_tokens=24)
write_text_graph(phrases, folder / "phrases.onnx", output="x", max_tokens=24)
states = ItemStates(components=torch.nn.functional.normalize(torch.randn(2, 2, 32), dim=-1).numpy())
with TextBundleWriter(folder / "text", item_ids=["a", "b"], texts=["cat", "dog"], words=words) as to:
    to.add_text_mol(folder / "text.onnx", states, mol.pair_gate(), head=head, max_tokens=24)
    to.add_phrases({"encoder.onnx": folder / "phrases.onnx"}, vocabulary="none", vocabulary_size=9, positions=4,
                   width=32, max_tokens=24)
    to.seal()
add_server_folders(folder / "text")
with torch.no_grad():
    for number, query in enumerate(queries):
        ids, mask = (torch.from_numpy(array) for array in WordPieces(words).batch([query], max_tokens=24))
        np.savez(folder / f"{number}.npz", text=mol.query_components(ids, mask != 0), phrases=phrases(ids, mask))
"""
QUERIES = ["space movies", "the cat!", "", "a dog " * 40, "the", "中 \N{ROCKET} cat", "cat " * 9]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text bundle and, per query, what PyTorch gives."""
    folder = tmp_path_factory.mktemp("tiny")
    # In a process of its own: this one stays without PyTorch, and without what exporting warns about.
    done = subprocess.run(
        [sys.executable, "-c", TINY_TEXT, str(folder), json.dumps(QUERIES)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def text_server(
    tiny: Path, small_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceServerClient]:
    """An inference server of its own, started by the launcher with the text bundle."""
    stack = Stack(tmp_path_factory.mktemp("texts"), bundle=small_bundle, text=tiny / "text", ports=Ports.free())
    try:
        stack.up(["inference-server"])
        with InferenceServerClient(stack.address("inference-server")) as client:
            yield client
    finally:
        stack.down()


def ask(client: InferenceServerClient, model: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    inputs = []
    for name, array in (("input_ids", ids), ("attention_mask", mask)):
        inputs.append(InferInput(name, array.shape, "INT64"))
        inputs[-1].set_data_from_numpy(array)
    output = client.get_model_config(model).config.output[0].name
    answer = client.infer(model, inputs, outputs=[InferRequestedOutput(output)], client_timeout=30)
    found = answer.as_numpy(output)
    assert found is not None
    return np.asarray(found)


def tokens(bundle: TextBundle, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return bundle.word_pieces.batch(texts, max_tokens=bundle.text_mol.max_tokens)


@pytest.mark.parametrize("model", ["text", "phrases"])
def test_served_vectors_equal_pytorchs_alone_and_in_company(
    text_server: InferenceServerClient, tiny: Path, model: str
) -> None:
    bundle = load_text_bundle(tiny / "text")
    expected = [np.load(tiny / f"{number}.npz")[model] for number in range(len(QUERIES))]
    together = ask(text_server, model, *tokens(bundle, QUERIES))
    # Requests of their own at once: the server makes batches of different lengths of them.
    with ThreadPoolExecutor(len(QUERIES)) as pool:
        alone = list(pool.map(lambda query: ask(text_server, model, *tokens(bundle, [query])), QUERIES))
    for number, each in enumerate(expected):
        np.testing.assert_allclose(together[number], each[0], atol=1e-4)
        np.testing.assert_allclose(alone[number], each, atol=1e-4)


@pytest.mark.parametrize("model", ["text", "phrases"])
def test_the_server_names_the_version_and_batches(text_server: InferenceServerClient, tiny: Path, model: str) -> None:
    config = text_server.get_model_config(model).config
    assert config.parameters["text_version"].string_value == load_text_bundle(tiny / "text").text_version
    assert config.HasField("dynamic_batching")
    assert text_server.is_model_ready("encoder")


def test_a_malformed_request_fails_alone_and_is_told_why(text_server: InferenceServerClient, tiny: Path) -> None:
    bundle = load_text_bundle(tiny / "text")
    ids, mask = tokens(bundle, ["the cat"])
    cases = [(ids, mask[:, :1], "must be equal"), (ids, np.zeros_like(mask), "without a token")]

    def refused(case: tuple[np.ndarray, np.ndarray, str]) -> bool:
        with pytest.raises(InferenceServerException, match=case[2]):
            ask(text_server, "text", case[0], case[1])
        return True

    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(ask, text_server, "text", ids, mask) for _ in range(2)]
        assert all(pool.map(refused, cases))
        for answer in good:
            assert answer.result().shape == (1, 3, 32)
