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

from torch import Tensor, nn

from services.algorithms.text_bundle import TextBundle, TextBundleWriter
from services.offline.training.int8_graphs import add_int8_graphs
from services.offline.training.models.text_mol import TextMol
from services.offline.training.onnx_graphs import export_text_encoder
from services.offline.training.text_mol.fit import TextFit
from services.offline.training.text_server import add_server_folders

OUTPUT = "components"


def write_text_mol(
    path: Path | str, fit: TextFit, *, item_ids: Sequence[str], texts: Sequence[str], queries: Sequence[str]
) -> TextBundle:
    """A text bundle with this fit as its text MoL, and the inference server's folders.

    The phrases of a text bundle there are kept where it stands over the same documents.

    `item_ids`, `texts`: of the documents that the fit encoded, in their order.
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
            output=OUTPUT,
            max_tokens=model.max_tokens,
            pieces=fit.tokenizer,
            queries=queries,
        )
        to.add_text_mol(onnx_file, fit.item_states, fit.pair_gate, head=model.head, max_tokens=model.max_tokens)
        to.seal(
            data={"text_mol": asdict(fit.settings)},
            metrics={"text_mol": {"export_error": worst, "loss": float(fit.losses[-20:].mean())}},
        )
    add_int8_graphs(path)
    return add_server_folders(path)


class QueryGraph(nn.Module):
    """The query side of the model, with the exported signature."""

    def __init__(self, model: TextMol) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.query_components(input_ids, attention_mask != 0)
