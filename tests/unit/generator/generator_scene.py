"""Seven films with a model bundle and a text bundle whose graphs are real: bags of words, so that who shares words is
near. ONNX Runtime runs them as it runs a trained one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fakes.generator import MemoryClicks
from onnx import TensorProto, helper, numpy_helper
from prometheus_client import CollectorRegistry

from services.algorithms.bundles.model_bundle import EncoderShape, HeadShape
from services.algorithms.bundles.text_bundle import TextBundle
from services.algorithms.generation.generator import Generator
from services.algorithms.generation.phrases_part import PhraseParts
from services.algorithms.generation.vocabulary import NUM_BYTE_TOKENS
from services.algorithms.scoring.states import ItemStates, PairGate
from services.algorithms.text.word_pieces import WordPieces
from services.contracts.topics.attributions import ForgetUpTo, Undo
from services.contracts.topics.items import CatalogueItem
from services.contracts.topics.search_clicks import SearchClick, encode_click
from services.generator.bootstrap import Ready, load_sources, make_servicer, make_watch
from services.generator.config import GeneratorSettings
from services.generator.domain.sources import Sources
from services.generator.followers import ClicksFollower, ItemChanges
from services.generator.metrics import GeneratorMetrics
from services.generator.server import GeneratorServicer
from services.offline.bundles.model import BundleContent, write_bundle
from services.offline.bundles.text import TextBundleWriter, save_phrases
from services.offline.training.phrases.vocabulary_fit import build_vocabulary
from services.platform.rpc.server import HealthState
from tests.unit.retrieval_scene import make_items, make_pair_gate

TITLES = {
    "1": "Toy Story",
    "2": "Space Jam",
    "3": "A Space Odyssey",
    "4": "The Lonely Dog",
    "5": "Cat and Dog",
    "6": "Red Story",
    "7": "Jam",
}
CATEGORIES = {"1": ("Animation",), "2": ("Animation", "Comedy"), "5": ("Comedy",)}
WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    *("toy", "story", "space", "jam", "a", "odyssey", "the", "lonely", "dog", "cat", "and", "red", "new", "saga"),
    *("movie", "film", "galaxy"),
]
POSITIONS = 4
WIDTH = 48  # words that are not shared are nearly orthogonal


def bag_of_words(path: Path, table: np.ndarray, rows: int, *, normalised: bool) -> Path:
    """A graph (B, L) ids and mask -> (B, rows, width): the sum of the words' rows of `table` (words, rows * width)."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["found"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["found", "column"], ["real"]),
        helper.make_node("ReduceSum", ["real", "tokens"], ["sum"], keepdims=0),
        helper.make_node("Reshape", ["sum", "shape"], ["rows"]),
        helper.make_node("LpNormalization" if normalised else "Identity", ["rows"], ["output"]),
    ]
    constants = {
        "table": table.astype(np.float32),
        "last": np.array([2], dtype=np.int64),
        "tokens": np.array([1], dtype=np.int64),
        "shape": np.array([-1, rows, table.shape[1] // rows], dtype=np.int64),
    }
    graph = helper.make_graph(
        nodes,
        "bag_of_words",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "L"])
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["B", rows, table.shape[1] // rows])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def write_catalogue(path: Path) -> Path:
    """The model bundle: what the gateway's items are."""
    rng = np.random.default_rng(0)
    write_bundle(
        path,
        BundleContent(
            encoder=EncoderShape(
                kind="hstu", num_blocks=1, num_heads=1, width=8, d_qk=8, d_v=8, max_history=20, num_time_buckets=8
            ),
            head=HeadShape(
                kind="mol", num_query_components=2, num_item_components=2, component_width=8, tau=0.05, gate_hidden=4
            ),
            weights={"encoder.bias": rng.normal(size=8).astype(np.float32)},
            item_states=make_items(rng, len(TITLES), 2, 2, 8),
            pair_gate=make_pair_gate(rng, 4, 4),
            item_ids=list(TITLES),
            titles=list(TITLES.values()),
            categories=[CATEGORIES.get(item_id, ()) for item_id in TITLES],
            counts=np.ones(len(TITLES), dtype=np.int64),
        ),
    )
    return path


def write_text(path: Path, scratch: Path, *, parts: tuple[str, ...] = ("text_mol", "phrases")) -> TextBundle:
    """A text bundle over the first six films, by these parts."""
    item_ids = list(TITLES)[:6]
    texts = [TITLES[item_id] for item_id in item_ids]
    with TextBundleWriter(path, item_ids=item_ids, texts=texts, words=WORDS) as to:
        if "text_mol" in parts:
            _add_text_mol(to, scratch, texts)
        if "phrases" in parts:
            _add_phrases(to, scratch, texts)
        return to.seal()


def _add_text_mol(to: TextBundleWriter, scratch: Path, texts: list[str]) -> None:
    rng = np.random.default_rng(1)
    table = rng.normal(size=(len(WORDS), 2 * WIDTH))
    table[:4] *= 0.1  # [CLS] and [SEP] say little
    pieces = WordPieces(WORDS)
    sums = np.stack([table[pieces.token_ids(text)].sum(axis=0) for text in texts]).reshape(-1, 2, WIDTH)
    components = (sums / np.linalg.norm(sums, axis=-1, keepdims=True)).astype(np.float32)
    head = HeadShape(
        kind="mol", num_query_components=2, num_item_components=2, component_width=WIDTH, tau=0.05, gate_hidden=4
    )
    # Pairs of equal components decide: what is not a match of words says nothing.
    gate = PairGate(
        hidden_weight=np.zeros((4, 4), dtype=np.float32),
        hidden_bias=np.zeros(4, dtype=np.float32),
        out_weight=np.zeros((4, 4), dtype=np.float32),
        out_bias=np.array([4, -4, -4, 4], dtype=np.float32),
    )
    graph = bag_of_words(scratch / "text.onnx", table, 2, normalised=True)
    to.add_text_mol(graph, ItemStates(components=components), gate, head=head, max_tokens=16)


def _add_phrases(to: TextBundleWriter, scratch: Path, texts: list[str]) -> None:
    width = len(WORDS)
    table = np.tile(np.eye(width), (1, 1 + POSITIONS))
    table[:4] = 0
    vocabulary = build_vocabulary([*texts, "New Saga", "Galaxy Film", "Saga"], size=600, min_count=1)
    weights = np.full((len(vocabulary), width), -0.5, dtype=np.float32)
    for token, (text, unusual) in enumerate(vocabulary.pieces, NUM_BYTE_TOKENS):
        for word in () if unusual else text.split():
            if word in WORDS:
                weights[token, WORDS.index(word)] = 4
    weights[0] = 0
    sequences = vocabulary.encode_all(texts)
    generator = Generator.build(
        weights,
        np.ones((1, width), dtype=np.float32),
        np.arange(len(vocabulary), dtype=np.int32)[None],
        sequences,
        texts,
        [[row] for row in range(len(texts))],
        max_tokens=POSITIONS,
    )
    folder = scratch / "phrases"
    graph = bag_of_words(scratch / "phrases.onnx", table, 1 + POSITIONS, normalised=False)
    to.add_phrases(
        save_phrases(folder, PhraseParts(generator, vocabulary), graph),
        vocabulary=vocabulary.fingerprint,
        vocabulary_size=len(vocabulary),
        positions=POSITIONS,
        width=width,
        max_tokens=16,
    )


def click(offset: int, query: str, item_id: str, user: str = "u") -> bytes:
    """A record of `search-clicks`: the interaction lies at 0:offset."""
    return encode_click(
        SearchClick(
            event_id=f"e{offset}",
            query=query,
            item_id=item_id,
            value=0,
            event_time_ms=1_000,
            recorded_ms=2_000,
            partition=0,
            offset=offset,
            user_pseudonym=user,
        )
    )


def undo(offset: int, undone: int, user: str = "u") -> bytes:
    return encode_click(
        Undo(
            event_id=f"e{offset}",
            item_id="1",
            undoes=(0, undone),
            event_time_ms=1_000,
            recorded_ms=2_000,
            partition=0,
            offset=offset,
            user_pseudonym=user,
        )
    )


def forget(user: str, up_to: int) -> bytes:
    return encode_click(
        ForgetUpTo(forget_id=f"f-{user}-{up_to}", up_to={0: up_to}, user_pseudonym=user, recorded_ms=3_000)
    )


@dataclass
class Running:
    """The process without Kafka: real sources, handlers and gRPC; topics in memory, followed by hand."""

    settings: GeneratorSettings
    sources: Sources
    servicer: GeneratorServicer
    changes: ItemChanges
    metrics: GeneratorMetrics
    registry: CollectorRegistry
    topic: MemoryClicks
    clicks: ClicksFollower | None

    def put(self, item_id: str, title: str = "", **fields: Any) -> None:
        """A record of `items` comes."""
        self.changes.describe([CatalogueItem(item_id=item_id, title=title, **fields)])

    def take(self, *records: bytes) -> None:
        """Records of `search-clicks` come, and are applied."""
        for record in records:
            self.topic.append(record)
        assert self.clicks is not None
        self.clicks.step()

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def make_running(
    folder: Path,
    *,
    text: str = "text",
    topic: MemoryClicks | None = None,
    waiting_for: set[str] | None = None,
    **own: Any,
) -> Running:
    """Over the bundles of a folder; `text` names the text bundle, which need not be there. It answers nothing while
    `waiting_for` holds a name."""
    settings = GeneratorSettings(port=0, metrics_port=0, bundle=folder / "bundle", text=folder / text, **own)
    registry = CollectorRegistry()
    metrics = GeneratorMetrics(registry)
    sources, _ = load_sources(settings, metrics)
    waiting_for = waiting_for or set()
    servicer = make_servicer(sources, metrics, next_item=lambda: 0, is_ready=Ready(waiting_for, HealthState()))
    topic = topic or MemoryClicks()
    clicks = None
    if sources.text is not None:
        clicks = ClicksFollower(topic, sources.text, metrics, poll_s=0)
    changes = ItemChanges(sources, metrics, on_change=make_watch(sources, servicer, metrics))
    return Running(settings, sources, servicer, changes, metrics, registry, topic, clicks)
