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
from services.offline.training.onnx_graphs import export_text_encoder
from services.offline.training.phrases.fit import TrainedPhrases
from services.offline.training.text_server import add_server_folders

OUTPUT = "x"


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
    Raises: ExportError if the graph's answers to `queries` differ by more than 1e-4; ValueError if `queries` is empty,
    or the target tokenizer is a baseline.
    """
    if not isinstance(trained.tokenizer, PhraseVocabulary):
        raise ValueError(f"the tokenizer is a {type(trained.tokenizer).__name__}; a bundle's is a PhraseVocabulary")
    shape = trained.encoder.shape
    with (
        TextBundleWriter(path, item_ids=item_ids, texts=texts, words=trained.pieces.words) as to,
        tempfile.TemporaryDirectory() as scratch,
    ):
        graph = Path(scratch) / "encoder.onnx"
        worst = export_text_encoder(
            trained.encoder, graph, output=OUTPUT, max_tokens=shape.max_tokens, pieces=trained.pieces, queries=queries
        )
        to.add_phrases(
            save_phrases(Path(scratch), PhraseParts(trained.generator(), trained.tokenizer), graph),
            vocabulary=trained.tokenizer.fingerprint,
            vocabulary_size=len(trained.tokenizer),
            positions=shape.positions,
            width=shape.width,
            max_tokens=shape.max_tokens,
        )
        to.seal(data={"phrases": dict(data)}, metrics={"phrases": {**trained.report, "export_error": worst}})
    add_int8_graphs(path)
    return add_server_folders(path)
