"""A PyTorch module as an ONNX file, and the session that answers from it as serving does.

It knows nothing of the encoder: what the graphs are is `export`'s and `step_export`'s.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


class ExportError(RuntimeError):
    """The exported encoder does not answer as PyTorch does, or cannot be made."""


def write_graph(
    graph: nn.Module,
    sample: dict[str, Any],
    dynamic: dict[str, Any],
    path: Path,
    *,
    inputs: list[str],
    outputs: list[str],
) -> None:
    """Export with the dynamo exporter; weights inside the file. Needs the packages onnx and onnxscript.

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
    """An ONNX Runtime session on one thread, as serving uses it. Raises: ExportError if ONNX Runtime is missing."""
    try:
        import onnxruntime
    except ImportError as exc:
        raise ExportError(f"checking the export needs onnxruntime: {exc}") from exc
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class quiet:
    """Hold back the libraries' own chatter: deprecations inside dependencies, progress and advice on their loggers."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", None)]
        self._levels = [(logger, logger.level) for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        for logger, level in self._levels:
            logger.setLevel(level)
        self._warnings.__exit__(None, None, None)
