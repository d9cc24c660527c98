"""Both encoders of a text bundle with their matrices in int8, for processors that multiply bytes (VNNI).

ONNX Runtime's dynamic quantization: weights by column, activations by the range of each call, so a query has to be
encoded alone if its answer must not depend on who else asks. Matrices behind GELU can stay in float32: outliers there
spread the range of a whole call (docs/decisions/022-int8-encoders.md has the figures). A graph that answers unlike the
float32 one is left out. It knows neither models nor training.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.algorithms.states import FloatArray
from services.algorithms.text_bundle import (
    INT8,
    PHRASE_ENCODER,
    PHRASES,
    TEXT_ENCODER,
    TEXT_MOL,
    TextBundle,
    add_text_files,
    load_text_bundle,
)
from services.training.onnx_graphs import ExportError, quiet, session

LEAST_COSINE = 0.95
# Part -> its graph, and how many of the matrices behind GELU stay in float32, from the first layer on (None: all).
_GRAPHS = {TEXT_MOL: (TEXT_ENCODER, 1), PHRASES: (PHRASE_ENCODER, None)}
_COMPARED = 64


def add_int8_graphs(path: Path | str) -> TextBundle:
    """Put `int8/<part>.onnx` into a sealed text bundle for each of its parts; its version stays.

    The bundle's metric "int8_cosine" says how near each is to float32; below `LEAST_COSINE` it is left out.
    Raises: BundleError if it is none; ExportError if a package is missing or a graph cannot be read.
    """
    bundle = load_text_bundle(path, verify=False)
    sources: dict[str, Path] = {}
    cosines: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in bundle.parts:
            name, kept = _GRAPHS[part]
            graph, written = bundle.file(name), Path(scratch) / f"{part}.onnx"
            write_int8(graph, written, kept=kept)
            max_tokens = (bundle.text_mol if part == TEXT_MOL else bundle.phrases).max_tokens
            cosines[part] = mean_cosine(bundle, graph, written, max_tokens=max_tokens)
            if cosines[part] >= LEAST_COSINE:
                sources[f"{INT8}/{part}.onnx"] = written
        return add_text_files(bundle.path, sources, metrics={"int8_cosine": cosines})


def write_int8(graph: Path, path: Path, *, kept: int | None) -> None:
    """`graph` with its weight matrices in int8, but for the first `kept` (None: all) that narrow, behind GELU.

    Raises: ExportError if a package is missing or the graph cannot be read.
    """
    try:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as exc:
        raise ExportError(f"int8 graphs need the packages onnx and onnxruntime: {exc}") from exc
    try:
        model = onnx.load(str(graph))
        # The exporter notes shapes of weights before their transposition, on which the quantizer's own inference fails.
        del model.graph.value_info[:]
        sizes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
        narrowing = [
            node.name
            for node in model.graph.node
            if node.op_type == "MatMul" and len(size := sizes.get(node.input[1], ())) == 2 and size[0] > size[1]
        ]
        with quiet():
            quantize_dynamic(
                model,
                str(path),
                weight_type=QuantType.QInt8,
                per_channel=True,
                op_types_to_quantize=["MatMul"],
                nodes_to_exclude=narrowing[:kept],
                extra_options={"MatMulConstBOnly": True},
            )
    except Exception as exc:  # neither library has one base class
        raise ExportError(f"{graph} cannot be written in int8: {exc}") from exc


def mean_cosine(bundle: TextBundle, graph: Path, other: Path, *, max_tokens: int) -> float:
    """Between the outputs of two graphs for the bundle's first documents, each encoded alone."""
    texts = bundle.texts[:_COMPARED]
    first, second = (_outputs(bundle, each, texts, max_tokens) for each in (graph, other))
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(((first * second).sum(axis=1) / np.maximum(lengths, np.finfo(np.float32).tiny)).mean())


def _outputs(bundle: TextBundle, graph: Path, texts: Sequence[str], max_tokens: int) -> FloatArray:
    """(rows, width): every output row of every text."""
    run = session(graph)
    names = [each.name for each in run.get_inputs()]
    found = []
    for text in texts:
        arrays = dict(
            zip(("input_ids", "attention_mask"), bundle.word_pieces.batch([text], max_tokens=max_tokens), strict=True)
        )
        found.append(run.run(None, {name: arrays[name] for name in names})[0][0])
    return np.concatenate(found).astype(np.float32)
