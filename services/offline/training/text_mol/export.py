"""A fine-tuned text encoder as ONNX, checked against PyTorch, and as the `text_mol` part of a text bundle.

Inputs input_ids, attention_mask (B, L) int64, [CLS] first and padded at the end; output components (B, P_q, d). The
aggregation tokens are put before the text inside the graph, so both encoders of a bundle read the same ids. B and L
are dynamic. A file whose answers differ from PyTorch's by more than 1e-4 is never put into a bundle.

Letters: B queries, L tokens, P_q query components, d component width.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from services.algorithms.text_bundle import TextBundle, TextBundleWriter
from services.algorithms.word_pieces import Tokens, WordPieces
from services.offline.training.int8_graphs import add_int8_graphs
from services.offline.training.models.text_mol import TextMol
from services.offline.training.onnx_graphs import ExportError, session, write_graph
from services.offline.training.text_mol.fit import TextFit
from services.offline.training.text_server import add_server_folders

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "components"
TOLERANCE = 1e-4


def write_text_onnx(model: TextMol, path: Path) -> None:
    """The query side of the model. Raises: ExportError if a package is missing."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=model.max_tokens)
    # Sizes that are neither 0, 1 nor each other's, so that the exporter takes no axis for a constant or for another.
    # A tensor each: the exporter makes one input of a tensor that is given twice.
    sample = {name: torch.ones(3, min(7, model.max_tokens), dtype=torch.int64) for name in INPUTS}
    dynamic = {name: {0: batch, 1: length} for name in INPUTS}
    write_graph(_Graph(model.eval()), sample, dynamic, path, inputs=list(INPUTS), outputs=[OUTPUT])


@torch.no_grad()
def max_text_difference(model: TextMol, path: Path, batches: Sequence[tuple[Tokens, Tokens]]) -> float:
    """Largest absolute difference between ONNX Runtime and PyTorch over batches of (ids, mask)."""
    run = session(path)
    worst = 0.0
    for ids, mask in batches:
        expected = model.query_components(torch.from_numpy(ids), torch.from_numpy(mask).bool()).numpy()
        found = run.run([OUTPUT], dict(zip(INPUTS, (ids, mask), strict=True)))[0]
        worst = max(worst, float(np.abs(found - expected).max()))
    return worst


def add_text_mol_part(to: TextBundleWriter, fit: TextFit, *, queries: Sequence[str]) -> float:
    """Export a fit and add it as the bundle's text MoL; returns the largest difference to PyTorch over `queries`.

    Raises: ExportError if that exceeds 1e-4; ValueError if the body reads no word pieces, or `queries` is empty.
    """
    if not isinstance(fit.tokenizer, WordPieces):
        raise ValueError("the body's tokenizer is no word list; a text bundle's queries are word pieces (BERT, MiniLM)")
    if not queries:
        raise ValueError("0 queries; allowed: at least 1, to check the export on")
    whole = fit.tokenizer.batch(queries, max_tokens=fit.model.max_tokens)
    single = fit.tokenizer.batch(queries[:1], max_tokens=fit.model.max_tokens)
    longest = fit.tokenizer.batch([" ".join(queries) * fit.model.max_tokens], max_tokens=fit.model.max_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "encoder.onnx"
        write_text_onnx(fit.model, path)
        worst = max_text_difference(fit.model, path, [whole, single, longest])
        if not worst <= TOLERANCE:
            raise ExportError(f"{path.name} differs from PyTorch by {worst:.3g}; allowed: {TOLERANCE:g}")
        to.add_text_mol(path, fit.item_states, fit.pair_gate, head=fit.model.head, max_tokens=fit.model.max_tokens)
    return worst


def write_text_mol(
    path: Path | str, fit: TextFit, *, item_ids: Sequence[str], texts: Sequence[str], queries: Sequence[str]
) -> TextBundle:
    """A text bundle with this fit as its text MoL, and the inference server's folders.

    The phrases of a text bundle there are kept where it stands over the same documents.

    `item_ids`, `texts`: of the documents that the fit encoded, in their order. Raises: as `add_text_mol_part`.
    """
    if not isinstance(fit.tokenizer, WordPieces):
        raise ValueError("the body's tokenizer is no word list; a text bundle's queries are word pieces (BERT, MiniLM)")
    with TextBundleWriter(path, item_ids=item_ids, texts=texts, words=fit.tokenizer.words) as to:
        worst = add_text_mol_part(to, fit, queries=queries)
        to.seal(
            data={"text_mol": asdict(fit.settings)},
            metrics={"text_mol": {"export_error": worst, "loss": float(fit.losses[-20:].mean())}},
        )
    add_int8_graphs(path)
    return add_server_folders(path)


class _Graph(nn.Module):
    """The model with the exported signature."""

    def __init__(self, model: TextMol) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.query_components(input_ids, attention_mask != 0)
