"""Write both encoders of a text bundle in int8, for processors that multiply bytes (VNNI; decision 022).

Dynamic quantization takes the activations' range from each call, so a query is encoded alone. Weights have 7 bits, so
that the sum of two byte products fits into 16 bits and every processor computes the same graph. A graph whose outputs
differ from the float32 graph's is omitted.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.text_bundle import (
    INT8,
    PHRASE_ENCODER,
    PHRASES,
    SHARED_INT8,
    TEXT_ENCODER,
    TEXT_MOL,
    TextBundle,
    load_text_bundle,
)
from services.algorithms.scoring.states import FloatArray
from services.offline.bundles.text import add_text_files
from services.offline.training.onnx_graphs import ExportError, quiet, session

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


LEAST_COSINE = 0.95
_GRAPHS = {TEXT_MOL: TEXT_ENCODER, PHRASES: PHRASE_ENCODER}
_COMPARED, _COMPARED_LAYERS = 64, 8


def add_int8_graphs(path: Path | str) -> TextBundle:
    """Add int8 graphs to a sealed text bundle; its version does not change.

    If the two encoders share layers, the file is `int8/shared.onnx`, else `int8/<part>.onnx`. The metric
    "int8_cosine" is each part's cosine to float32; a part below `LEAST_COSINE` is omitted.
    Raises: BundleError if `path` is no text bundle; ExportError if a package is missing or a graph cannot be read.
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
    """Return one int8 graph for both parts, with each part's cosine to float32; None if they share no layer."""
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
    """Write `graph` with weight matrices in int8, except the first narrowing matrix, which follows a GELU.

    Raises: ExportError if a package is missing or the graph cannot be read.
    """
    try:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as exc:
        raise ExportError(f"int8 graphs need the packages onnx and onnxruntime: {exc}") from exc
    try:
        model = onnx.load(str(graph))
        # The exporter records weights' shapes before their transposition, on which the quantizer's shape inference
        # fails.
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
                reduce_range=True,
                op_types_to_quantize=["MatMul"],
                nodes_to_exclude=narrowing[:1],
                extra_options={"MatMulConstBOnly": True},
            )
    except Exception as exc:  # neither library has a common base class of errors
        raise ExportError(f"{graph} cannot be written in int8: {exc}") from exc


def mean_cosine(bundle: TextBundle, part: str, other: Path, *, output: str | None = None) -> float:
    """Return the mean cosine between outputs of a part's graph and of `other`, on the bundle's first documents."""
    first = _outputs(bundle, part, bundle.file(_GRAPHS[part]), None)
    second = _outputs(bundle, part, other, output)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(((first * second).sum(axis=1) / np.maximum(lengths, np.finfo(np.float32).tiny)).mean())


def _outputs(bundle: TextBundle, part: str, graph: Path, output: str | None) -> FloatArray:
    """Return outputs (rows, width) of a graph on the first documents."""
    run = session(graph)
    known = {each.name for each in run.get_inputs()}
    found = []
    for text in bundle.texts[:_COMPARED]:
        feeds = {name: array for name, array in _feeds(bundle, part=part, text=text).items() if name in known}
        found.append(run.run(None if output is None else [output], feeds)[0][0])
    return np.concatenate(found).astype(np.float32)


def _feeds(bundle: TextBundle, *, part: str, text: str) -> dict[str, npt.NDArray[np.int64]]:
    max_tokens = (bundle.text_mol if part == TEXT_MOL else bundle.phrases).max_tokens
    ids, mask = bundle.word_pieces.batch([text], max_tokens=max_tokens)
    return {"input_ids": ids, "attention_mask": mask}


Feeds = Mapping[str, npt.NDArray[np.int64]]

# Float32 products of different shapes round differently.
_TOLERANCE = 1e-4
_PREFIX = "narrow/"


def write_shared(wide: tuple[str, Path], narrow: tuple[str, Path], path: Path, batches: Sequence[Feeds]) -> bool:
    """Write one graph that joins two, each given as (output's name, graph). Return False if they have no layer in
    common, or if the joined graph's outputs differ from theirs.

    `wide` pads queries inside, `narrow` reads their T tokens alone. Both have inputs input_ids and attention_mask (B,
    T) int64. batches: queries to compare them on. Raises: ExportError if onnx is missing.
    """
    try:
        import onnx
    except ImportError as exc:
        raise ExportError(f"a shared graph needs the package onnx: {exc}") from exc
    models = [onnx.load(str(graph)) for _, graph in (wide, narrow)]
    common = _deepest_common(models, batches)
    if common is None:
        return False
    (wide_name, _), (narrow_name, _) = wide, narrow
    onnx.save(_joined(models[0], models[1], common, (wide_name, narrow_name)), str(path))
    return _answers_alike(path, {wide_name: wide[1], narrow_name: narrow[1]}, batches)


def _deepest_common(models: Sequence["ModelProto"], batches: Sequence[Feeds]) -> tuple[str, str] | None:
    """Return each graph's output name of the last layer norm whose rows are equal in both; None if there is none."""
    norms = [[node.output[0] for node in model.graph.node if node.op_type == "LayerNormalization"] for model in models]
    found = [_values(model, names, batches) for model, names in zip(models, norms, strict=True)]
    deepest = None
    # The first layer norm follows the embeddings.
    for number, names in enumerate(zip(norms[0], norms[1], strict=False)):
        for feeds, wide, narrow in zip(batches, *found, strict=True):
            rows = wide[number][:, : feeds["input_ids"].shape[1]]
            if rows.shape != narrow[number].shape or not np.abs(rows - narrow[number]).max() <= _TOLERANCE:
                return deepest
        deepest = names if number else None
    return deepest


def _values(model: "ModelProto", names: Sequence[str], batches: Sequence[Feeds]) -> list[list[npt.NDArray[np.float32]]]:
    import onnx
    import onnxruntime

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    there = {output.name for output in probe.graph.output}
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in there)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # hides warnings about outputs without a type
    run = onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [run.run(list(names), dict(feeds)) for feeds in batches] if names else [[] for _ in batches]


def _joined(wide: "ModelProto", narrow: "ModelProto", common: tuple[str, str], names: tuple[str, str]) -> "ModelProto":
    """Return `wide` with the nodes of `narrow` above `common`; these read its first T rows."""
    import onnx
    from onnx import helper, numpy_helper

    wide_cut, narrow_cut = common
    above = _above(narrow, narrow_cut)
    graph = wide.graph
    inputs = {tensor.name for tensor in narrow.graph.input}

    def named(value: str) -> str:
        if not value or value in inputs:
            return value
        return f"{_PREFIX}cut" if value == narrow_cut else _PREFIX + value

    needed = {value for node in above for value in node.input}
    for tensor in narrow.graph.initializer:
        if tensor.name in needed:
            copied = onnx.TensorProto()
            copied.CopyFrom(tensor)
            copied.name = named(tensor.name)
            graph.initializer.append(copied)
    for name, value in (("first", 0), ("axis", 1)):
        graph.initializer.append(numpy_helper.from_array(np.array([value], dtype=np.int64), _PREFIX + name))
    graph.node.extend(
        (
            helper.make_node("Shape", ["input_ids"], [f"{_PREFIX}columns"], start=1, end=2),
            helper.make_node(
                "Slice",
                [wide_cut, f"{_PREFIX}first", f"{_PREFIX}columns", f"{_PREFIX}axis"],
                [f"{_PREFIX}cut"],
            ),
        )
    )
    for node in above:
        copied_node = onnx.NodeProto()
        copied_node.CopyFrom(node)
        copied_node.name = _PREFIX + node.name
        copied_node.input[:] = [named(value) for value in node.input]
        copied_node.output[:] = [named(value) for value in node.output]
        graph.node.append(copied_node)
    result = graph.output.add()
    result.CopyFrom(narrow.graph.output[0])
    result.name = named(result.name)
    for output, name in zip(graph.output, names, strict=True):
        graph.node.append(helper.make_node("Identity", [output.name], [name]))
        output.name = name
    # The recorded shapes describe only `wide`.
    del graph.value_info[:]
    return wide


def _above(model: "ModelProto", cut: str) -> list["NodeProto"]:
    """Return the nodes that the first output needs besides those that compute `cut`, in the graph's order."""
    maker = {value: number for number, node in enumerate(model.graph.node) for value in node.output}
    needed: set[int] = set()
    open_values = [model.graph.output[0].name]
    while open_values:
        value = open_values.pop()
        number = maker.get(value)
        if value == cut or number is None or number in needed:
            continue
        needed.add(number)
        open_values.extend(model.graph.node[number].input)
    return [model.graph.node[number] for number in sorted(needed)]


def _answers_alike(path: Path, graphs: Mapping[str, Path], batches: Sequence[Feeds]) -> bool:
    together = session(path)
    for name, graph in graphs.items():
        alone = session(graph)
        for feeds in batches:
            (expected,), (found,) = alone.run(None, dict(feeds)), together.run([name], dict(feeds))
            if found.shape != expected.shape or not np.abs(found - expected).max() <= _TOLERANCE:
                return False
    return True
