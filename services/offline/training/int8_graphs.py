"""Both encoders of a text bundle with their matrices in int8, for processors that multiply bytes (VNNI).

ONNX Runtime's dynamic quantization: weights by column, activations by the range of each call, so a query has to be
encoded alone if its answer must not depend on who else asks. The matrix behind the first layer's GELU stays in float32:
outliers there spread the range of a whole call (docs/decisions/022-int8-encoders.md has the figures). A graph that
answers unlike the float32 one is left out. It knows neither models nor training.
"""

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.algorithms.states import FloatArray
from services.algorithms.text_bundle import (
    INT8,
    PHRASE_ENCODER,
    PHRASES,
    SHARED_INT8,
    TEXT_ENCODER,
    TEXT_MOL,
    TextBundle,
    add_text_files,
    load_text_bundle,
)
from services.offline.training.onnx_graphs import ExportError, quiet, session
from services.offline.training.shared_graph import write_shared

LEAST_COSINE = 0.95
_GRAPHS = {TEXT_MOL: TEXT_ENCODER, PHRASES: PHRASE_ENCODER}
_COMPARED, _COMPARED_LAYERS = 64, 8


def add_int8_graphs(path: Path | str) -> TextBundle:
    """Put int8 graphs into a sealed text bundle: `int8/shared.onnx` where its two encoders have layers in common, else
    `int8/<part>.onnx` for each; its version stays.

    The bundle's metric "int8_cosine" says how near each part is to float32; below `LEAST_COSINE` it is left out.
    Raises: BundleError if it is none; ExportError if a package is missing or a graph cannot be read.
    """
    bundle = load_text_bundle(path, verify=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found = _shared(bundle, folder)
        if found is not None and all(cosine >= LEAST_COSINE for cosine in found[1].values()):
            return add_text_files(bundle.path, {SHARED_INT8: found[0]}, metrics={"int8_cosine": found[1]})
        sources: dict[str, Path] = {}
        cosines: dict[str, float] = {}
        for part in bundle.parts:
            written = folder / f"{part}.onnx"
            write_int8(bundle.file(_GRAPHS[part]), written)
            cosines[part] = mean_cosine(bundle, part, written)
            if cosines[part] >= LEAST_COSINE:
                sources[f"{INT8}/{part}.onnx"] = written
        return add_text_files(bundle.path, sources, metrics={"int8_cosine": cosines})


def _shared(bundle: TextBundle, folder: Path) -> tuple[Path, dict[str, float]] | None:
    """One int8 graph for both parts and each one's cosine to float32; None where there is none."""
    if set(bundle.parts) != set(_GRAPHS) or bundle.phrases.max_tokens != bundle.text_mol.max_tokens:
        return None
    batches = [_feeds(bundle, part=PHRASES, text=text) for text in ("", *bundle.texts[:_COMPARED_LAYERS])]
    phrases, text_mol = ((part, bundle.file(_GRAPHS[part])) for part in (PHRASES, TEXT_MOL))
    whole, written = folder / "whole.onnx", folder / "shared.onnx"
    if not write_shared(phrases, text_mol, whole, batches):
        return None
    write_int8(whole, written)
    return written, {part: mean_cosine(bundle, part, written, output=part) for part in bundle.parts}


def write_int8(graph: Path, path: Path) -> None:
    """`graph` with its weight matrices in int8, but for the first that narrows, behind the first layer's GELU.

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
                nodes_to_exclude=narrowing[:1],
                extra_options={"MatMulConstBOnly": True},
            )
    except Exception as exc:  # neither library has one base class
        raise ExportError(f"{graph} cannot be written in int8: {exc}") from exc


def mean_cosine(bundle: TextBundle, part: str, other: Path, *, output: str | None = None) -> float:
    """Between the outputs of a part's graph and of another (None: its only one) for the bundle's first documents, each
    encoded alone."""
    first = _outputs(bundle, part, bundle.file(_GRAPHS[part]), None)
    second = _outputs(bundle, part, other, output)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(((first * second).sum(axis=1) / np.maximum(lengths, np.finfo(np.float32).tiny)).mean())


def _outputs(bundle: TextBundle, part: str, graph: Path, output: str | None) -> FloatArray:
    """(rows, width): every output row of every text."""
    run = session(graph)
    known = {each.name for each in run.get_inputs()}
    found = []
    for text in bundle.texts[:_COMPARED]:
        feeds = {name: array for name, array in _feeds(bundle, part=part, text=text).items() if name in known}
        found.append(run.run(None if output is None else [output], feeds)[0][0])
    return np.concatenate(found).astype(np.float32)


def _feeds(bundle: TextBundle, *, part: str, text: str) -> dict[str, npt.NDArray[np.int64]]:
    """One text as a graph's inputs."""
    max_tokens = (bundle.text_mol if part == TEXT_MOL else bundle.phrases).max_tokens
    ids, mask = bundle.word_pieces.batch([text], max_tokens=max_tokens)
    return {"input_ids": ids, "attention_mask": mask}
