"""Write a PyTorch module as ONNX, open it as serving does, and check it.

Letters: B queries, T tokens.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from services.algorithms.text.word_pieces import Tokens, WordPieces

TOLERANCE = 1e-4
TEXT_INPUTS = ("input_ids", "attention_mask")


class ExportError(RuntimeError):
    """The export failed, or its outputs differ from PyTorch's."""


def write_graph(
    graph: nn.Module,
    sample: dict[str, Any],
    dynamic: dict[str, Any],
    path: Path,
    *,
    inputs: list[str],
    outputs: list[str],
) -> None:
    """Export with the dynamo exporter, with the weights.

    sample, dynamic: example arguments by name, and their dynamic axes; inputs, outputs: names in the graph's order.
    Raises: ExportError if a package is missing.
    """
    try:
        with quiet():
            program = torch.onnx.export(
                graph,
                kwargs=sample,
                dynamo=True,
                verbose=False,
                dynamic_shapes=dynamic,
                input_names=inputs,
                output_names=outputs,
            )
    except ImportError as exc:
        raise ExportError(f"export needs the packages onnx and onnxscript: {exc}") from exc
    if program is None:
        raise ExportError("the exporter returned nothing")
    program.save(str(path), external_data=False)


def session(path: Path) -> Any:
    """Return a session on one thread, as in serving. Raises: ExportError if ONNX Runtime is missing."""
    try:
        import onnxruntime
    except ImportError as exc:
        raise ExportError(f"checking the export needs onnxruntime: {exc}") from exc
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def refuse_difference(name: str, difference: float) -> None:
    """Raises: ExportError for a difference above TOLERANCE."""
    if not difference <= TOLERANCE:
        raise ExportError(f"{name} differs from PyTorch by {difference:.3g}; allowed: {TOLERANCE:g}")


def write_text_graph(encoder: nn.Module, path: Path, *, output: str, max_tokens: int) -> None:
    """Write a text encoder's graph with one output.

    Inputs: TEXT_INPUTS (B, T) int64, B and T dynamic, T at most `max_tokens`.
    """
    batch, columns = torch.export.Dim("batch"), torch.export.Dim("columns", max=max_tokens)
    # Sizes differ and are neither 0 nor 1, so that the exporter mistakes no axis for a constant or for another axis. A
    # tensor passed twice becomes a single input (outputs differed by 4).
    sample = {name: torch.ones(3, min(7, max_tokens), dtype=torch.int64) for name in TEXT_INPUTS}
    dynamic = {name: {0: batch, 1: columns} for name in TEXT_INPUTS}
    write_graph(encoder.eval(), sample, dynamic, path, inputs=list(TEXT_INPUTS), outputs=[output])


@torch.no_grad()
def max_text_difference(encoder: nn.Module, path: Path, batches: Sequence[tuple[Tokens, Tokens]]) -> float:
    """Return the largest absolute difference between graph and encoder over batches of (ids, mask)."""
    run, worst = session(path), 0.0
    for ids, mask in batches:
        expected = encoder(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        found = run.run(None, dict(zip(TEXT_INPUTS, (ids, mask), strict=True)))[0]
        if found.shape != expected.shape:
            raise ExportError(f"{path.name} answers {found.shape}; PyTorch {expected.shape}")
        worst = max(worst, float(np.abs(found - expected).max()))
    return worst


def export_text_encoder(
    encoder: nn.Module, path: Path, *, output: str, max_tokens: int, pieces: WordPieces, queries: Sequence[str]
) -> float:
    """Write a text encoder's graph; compare it on all queries, one alone, empty ones, and one that is cut.

    Returns the largest difference. Raises: ValueError without queries; ExportError if outputs differ.
    """
    if not queries:
        raise ValueError("0 queries; allowed: at least 1, to check the export on")
    texts = (queries, queries[:1], ["", ""], [" ".join(queries) * max_tokens])
    batches = [pieces.batch(each, max_tokens=max_tokens) for each in texts]
    write_text_graph(encoder, path, output=output, max_tokens=max_tokens)
    worst = max_text_difference(encoder, path, batches)
    refuse_difference(path.name, worst)
    return worst


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's deprecation warnings, progress and advice."""
    levels = [(logger, logger.level) for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", None))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger, _ in levels:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in levels:
                logger.setLevel(level)
