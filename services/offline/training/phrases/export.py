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

import numpy as np
import torch
from torch import nn

from services.algorithms.generation.phrases_part import PhraseParts, save_phrases
from services.algorithms.generation.vocabulary import PhraseVocabulary
from services.algorithms.text_bundle import TextBundle, TextBundleWriter
from services.algorithms.word_pieces import Tokens
from services.offline.training.int8_graphs import add_int8_graphs
from services.offline.training.models.phrase_nar import PhraseEncoder
from services.offline.training.onnx_graphs import ExportError, session, write_graph
from services.offline.training.phrases.fit import TrainedPhrases
from services.offline.training.text_server import add_server_folders

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "x"
TOLERANCE = 1e-4


def write_phrase_onnx(encoder: nn.Module, path: Path, *, max_tokens: int) -> None:
    """The encoder's graph. Raises: ExportError if a package is missing."""
    batch, columns = torch.export.Dim("batch"), torch.export.Dim("columns", max=max_tokens)
    # Sizes that are neither 0, 1 nor each other's, so that the exporter takes no axis for a constant or for another.
    # Two tensors: of one given twice, the exporter makes one input (answers differed by 4).
    sample = {name: torch.ones(3, min(7, max_tokens), dtype=torch.int64) for name in INPUTS}
    dynamic = {name: {0: batch, 1: columns} for name in INPUTS}
    write_graph(encoder.eval(), sample, dynamic, path, inputs=list(INPUTS), outputs=[OUTPUT])


@torch.no_grad()
def max_phrase_difference(encoder: PhraseEncoder, path: Path, batches: Sequence[tuple[Tokens, Tokens]]) -> float:
    """Largest absolute difference between ONNX Runtime and PyTorch over batches of (ids, mask)."""
    run, worst = session(path), 0.0
    for ids, mask in batches:
        expected = encoder(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        found = run.run([OUTPUT], dict(zip(INPUTS, (ids, mask), strict=True)))[0]
        if found.shape != expected.shape:
            raise ExportError(f"{path.name} answers {found.shape}; PyTorch {expected.shape}")
        worst = max(worst, float(np.abs(found - expected).max()))
    return worst


def add_phrases_part(to: TextBundleWriter, trained: TrainedPhrases, *, queries: Sequence[str]) -> float:
    """Export and add as the bundle's phrases; returns the largest difference to PyTorch over `queries`.

    Document rows of the training are the bundle's, in their order.
    Raises: ExportError if that exceeds 1e-4; ValueError if `queries` is empty, or the target tokenizer is a baseline.
    """
    if not isinstance(trained.tokenizer, PhraseVocabulary):
        raise ValueError(f"the tokenizer is a {type(trained.tokenizer).__name__}; a bundle's is a PhraseVocabulary")
    if not queries:
        raise ValueError("0 queries; allowed: at least 1, to check the export on")
    shape, pieces = trained.encoder.shape, trained.pieces
    batches = [
        pieces.batch(texts, max_tokens=shape.max_tokens)
        for texts in (queries, queries[:1], ["", ""], [" ".join(queries) * shape.max_tokens])
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        graph = folder / "encoder.onnx"
        write_phrase_onnx(trained.encoder, graph, max_tokens=shape.max_tokens)
        worst = max_phrase_difference(trained.encoder, graph, batches)
        if not worst <= TOLERANCE:
            raise ExportError(f"{graph.name} differs from PyTorch by {worst:.3g}; allowed: {TOLERANCE:g}")
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
