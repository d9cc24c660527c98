"""Write a text bundle for a model bundle's catalogue (`freshet train-text`).

Text MoL and the phrase model are trained on titles, categories and pseudo queries. Each training preserves the other
model's part of the folder.
For data with real queries use `train_phrases` and `train_text_mol`.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.algorithms.bundles.text_bundle import TextBundle
from services.algorithms.generation.phrases_part import PhraseParts
from services.algorithms.generation.vocabulary import FIXED_TOKENS
from services.offline.bundles.folders import require_target
from services.offline.bundles.text import TextBundleWriter, save_phrases
from services.offline.training.int8_graphs import add_int8_graphs
from services.offline.training.models.text_mol import TextMol
from services.offline.training.onnx_graphs import export_text_encoder
from services.offline.training.phrases.fit import PhraseSettings, TrainedPhrases, train_phrases
from services.offline.training.phrases.pseudo_queries import CatalogueTexts, catalogue_texts
from services.offline.training.phrases.vocabulary_fit import build_vocabulary
from services.offline.training.progress import Progress
from services.offline.training.text_mol.fit import TextFit, TextMolSettings, train_text_mol

_TEXT_MOL_OUTPUT = "components"


def write_text_mol(
    path: Path | str, fit: TextFit, *, item_ids: Sequence[str], texts: Sequence[str], queries: Sequence[str]
) -> TextBundle:
    """Write a text bundle with this fit as its text MoL.

    An existing bundle's phrases are preserved if its documents are the same. `item_ids`, `texts`: the fit's documents.
    Raises: ExportError if the graph's answers to `queries` differ by more than 1e-4; ValueError if the body reads no
    word pieces, or `queries` is empty.
    """
    model = fit.model
    with (
        TextBundleWriter(path, item_ids=item_ids, texts=texts, words=fit.tokenizer.words) as to,
        tempfile.TemporaryDirectory() as scratch,
    ):
        onnx_file = Path(scratch) / "encoder.onnx"
        worst = export_text_encoder(
            QueryGraph(model),
            onnx_file,
            output=_TEXT_MOL_OUTPUT,
            max_tokens=model.max_tokens,
            pieces=fit.tokenizer,
            queries=queries,
        )
        to.add_text_mol(onnx_file, fit.item_states, fit.pair_gate, head=model.head, max_tokens=model.max_tokens)
        to.seal(
            data={"text_mol": asdict(fit.settings)},
            metrics={"text_mol": {"export_error": worst, "loss": float(fit.losses[-20:].mean())}},
        )
    return add_int8_graphs(path)


class QueryGraph(nn.Module):
    """The query encoder with the exported signature."""

    def __init__(self, model: TextMol) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.query_components(input_ids, attention_mask != 0)


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
    """Write a text bundle with this model as its phrases.

    An existing bundle's text MoL is preserved if its documents are the same. `item_ids`, `texts`: the training
    documents; `data`: origin of the training queries.
    Raises: ExportError if the graph's answers to `queries` differ by more than 1e-4; ValueError if `queries` is empty.
    """
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
    return add_int8_graphs(path)


_CHECKED_QUERIES = 64
# Rarer phrases are learnt no better than their words. The paper has 20, for 80 million identifiers.
_MIN_COUNT = 3


def train_phrases_part(
    bundle: Path, out: Path, *, vocabulary: int, settings: PhraseSettings, seed: int, progress: Progress
) -> dict[str, Any]:
    """Train a catalogue's phrase vocabulary, phrase model and shortlist into the text bundle `out`; return a report.

    Raises: BundleError; ValueError and ExportError of training and export.
    """
    require_target(out)
    texts = _texts(load_bundle(bundle), seed)
    identifier_texts = [text for each in texts.identifiers for text in each]
    trained = train_phrases(
        texts.pairs,
        texts.identifiers,
        build_vocabulary(identifier_texts, size=max(vocabulary, FIXED_TOKENS), min_count=_MIN_COUNT),
        settings,
        seed,
        progress=progress,
    )
    data = {"queries": "pseudo", "num_queries": len(texts.pairs), "documents": len(texts.texts), "seed": seed}
    written = _export(out, progress, lambda **documents: write_phrases(out, trained, data=data, **documents), texts)
    return written | trained.report


def train_text_mol_part(
    bundle: Path, out: Path, *, settings: TextMolSettings, seed: int, progress: Progress
) -> dict[str, Any]:
    """Train a catalogue's text MoL into the text bundle `out`; return a report. Raises: see `train_phrases_part`."""
    require_target(out)
    texts = _texts(load_bundle(bundle), seed)
    fit = train_text_mol(
        texts.pairs,
        texts.texts,
        settings,
        seed,
        progress=progress,
    )
    written = _export(out, progress, lambda **documents: write_text_mol(out, fit, **documents), texts)
    return written | asdict(settings) | {"loss": float(fit.losses[-20:].mean()), "train_seconds": fit.seconds}


def _texts(bundle: Bundle, seed: int) -> CatalogueTexts:
    return catalogue_texts(bundle.item_ids, bundle.titles, bundle.categories, seed=seed)


def _export(out: Path, progress: Progress, write: Callable[..., TextBundle], texts: CatalogueTexts) -> dict[str, Any]:
    progress("export", 0, 1, float("nan"))
    queries = [text for text, _ in texts.pairs[:_CHECKED_QUERIES]]
    written = write(item_ids=texts.item_ids, texts=texts.texts, queries=queries)
    progress("export", 1, 1, float("nan"))
    return {"text_bundle": str(out), "text_version": written.text_version}
