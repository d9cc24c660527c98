"""A trained phrase model as the `phrases/` part of a text bundle, its encoder as ONNX, checked against PyTorch.

Inputs input_ids, attention_mask (B, T) int64, [CLS] first, padded at the end, T at most the manifest's max_tokens;
output x (B, 1+s, D), x_0 first. Queries shorter than 1+s are padded inside the graph. B and T are dynamic. A file
whose answers differ from PyTorch's by more than 1e-4 is never put into a bundle.

Letters: B queries, T tokens, s output positions, D width.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.algorithms.generation.phrases_part import PhraseParts, save_phrases
from services.algorithms.generation.vocabulary import PhraseVocabulary
from services.algorithms.text_bundle import TextBundle, TextBundleWriter
from services.offline.training.int8_graphs import add_int8_graphs
from services.offline.training.onnx_graphs import (
    checked_batches,
    max_text_difference,
    refuse_difference,
    write_text_graph,
)
from services.offline.training.phrases.fit import TrainedPhrases
from services.offline.training.text_server import add_server_folders

OUTPUT = "x"


def add_phrases_part(to: TextBundleWriter, trained: TrainedPhrases, *, queries: Sequence[str]) -> float:
    """Export and add as the bundle's phrases; returns the largest difference to PyTorch over `queries`.

    Document rows of the training are the bundle's, in their order.
    Raises: ExportError if that exceeds 1e-4; ValueError if `queries` is empty, or the target tokenizer is a baseline.
    """
    if not isinstance(trained.tokenizer, PhraseVocabulary):
        raise ValueError(f"the tokenizer is a {type(trained.tokenizer).__name__}; a bundle's is a PhraseVocabulary")
    shape = trained.encoder.shape
    batches = checked_batches(trained.pieces, queries, max_tokens=shape.max_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        graph = folder / "encoder.onnx"
        write_text_graph(trained.encoder, graph, output=OUTPUT, max_tokens=shape.max_tokens)
        worst = max_text_difference(trained.encoder, graph, batches)
        refuse_difference(graph.name, worst)
        files = save_phrases(folder, PhraseParts(trained.generator(), trained.tokenizer), graph)
        to.add_phrases(
            files,
            vocabulary=trained.tokenizer.fingerprint,
            vocabulary_size=len(trained.tokenizer),
            positions=shape.positions,
            width=shape.width,
            max_tokens=shape.max_tokens,
        )
    return worst


def write_phrases(
    path: Path | str,
    trained: TrainedPhrases,
    *,
    item_ids: Sequence[str],
    texts: Sequence[str],
    queries: Sequence[str],
    data: Mapping[str, Any],
) -> TextBundle:
    """A text bundle with this model as its phrases (its text MoL is kept where it stands over the same documents).

    `item_ids`, `texts`: the documents in the order of the training's rows; `data`: where its queries came from.
    Raises: as `add_phrases_part`.
    """
    with TextBundleWriter(path, item_ids=item_ids, texts=texts, words=trained.pieces.words) as to:
        worst = add_phrases_part(to, trained, queries=queries)
        to.seal(data={"phrases": dict(data)}, metrics={"phrases": {**trained.report, "export_error": worst}})
    add_int8_graphs(path)
    return add_server_folders(path)
