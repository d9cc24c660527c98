"""A small word list, documents and a text bundle's parts, for the tests of text."""

from pathlib import Path

import numpy as np

from services.algorithms.bundles.text_bundle import HeadShape, TextBundle
from services.algorithms.scoring.states import ItemStates, PairGate
from services.offline.bundles.text import TextBundleWriter

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "space", "movie", "##s", "cat", "dog", "a", "the", "!", "中", "##c"]
ITEM_IDS = ["film-0", "film-1", "film-2"]
TEXTS = ["space movies", "the cat", "a dog!"]
HEAD = HeadShape(kind="mol", num_query_components=2, num_item_components=2, component_width=4, tau=0.05, gate_hidden=3)


def writer(path: Path, *, words: list[str] = WORDS, texts: list[str] = TEXTS) -> TextBundleWriter:
    return TextBundleWriter(path, item_ids=ITEM_IDS, texts=texts, words=words)


def states(seed: int = 0, head: HeadShape = HEAD, count: int = len(ITEM_IDS)) -> ItemStates:
    rng = np.random.default_rng(seed)
    components = rng.normal(size=(count, head.num_item_components, head.component_width)).astype(np.float32)
    return ItemStates(components=components / np.linalg.norm(components, axis=-1, keepdims=True))


def pair_gate(seed: int = 0, head: HeadShape = HEAD) -> PairGate:
    rng = np.random.default_rng(seed)
    pairs, hidden = head.num_pairs, head.gate_hidden
    return PairGate(
        hidden_weight=rng.normal(size=(hidden, pairs)).astype(np.float32),
        hidden_bias=rng.normal(size=hidden).astype(np.float32),
        out_weight=rng.normal(size=(pairs, hidden)).astype(np.float32),
        out_bias=rng.normal(size=pairs).astype(np.float32),
    )


def some_file(folder: Path, name: str, content: bytes = b"content") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def add_text_mol(to: TextBundleWriter, folder: Path, *, seed: int = 0, head: HeadShape = HEAD) -> None:
    to.add_text_mol(some_file(folder, "text.onnx"), states(seed), pair_gate(seed), head=head, max_tokens=16)


def add_phrases(to: TextBundleWriter, folder: Path, *, vocabulary: str = "abc") -> None:
    files = {"encoder.onnx": some_file(folder, "phrases.onnx"), "trie.bin": some_file(folder, "trie.bin", b"trie")}
    to.add_phrases(files, vocabulary=vocabulary, vocabulary_size=9, positions=4, width=4, max_tokens=16)


def write_both(path: Path, scratch: Path) -> TextBundle:
    with writer(path) as to:
        add_text_mol(to, scratch)
        add_phrases(to, scratch)
        return to.seal(data={"name": "test"})
