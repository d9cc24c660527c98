"""Both query encoders of a text bundle as one graph, where they have their lower layers in common.

On a CPU training moves the last two layers alone, so both models read a query with the same four layers below: once is
enough. The phrase model pads a query to its output positions; padding is never attended to, so the rows of the query's
own tokens are what the text model's layers give. Which layers are common is measured, not assumed: models that were
trained whole (on a GPU) have none. It knows neither models nor bundles.

Letters: B queries, T tokens, D width.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.offline.training.onnx_graphs import ExportError, session

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

Feeds = Mapping[str, npt.NDArray[np.int64]]

# What values may differ by and be the same: float32 products of other shapes.
_TOLERANCE = 1e-4
_PREFIX = "narrow/"


def write_shared(wide: tuple[str, Path], narrow: tuple[str, Path], path: Path, batches: Sequence[Feeds]) -> bool:
    """One graph with an output for each of two: (name of its output, graph); False if they have no layer in common, or
    it would not answer as they do.

    `wide` pads queries inside, `narrow` reads their T tokens alone; inputs input_ids and attention_mask (B, T) int64
    are the same. batches: queries to compare them on. Raises: ExportError if onnx is missing.
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
    """Names of the last layer norms' outputs, one of each graph, whose rows are the same; None if no layer's are."""
    norms = [[node.output[0] for node in model.graph.node if node.op_type == "LayerNormalization"] for model in models]
    found = [_values(model, names, batches) for model, names in zip(models, norms, strict=True)]
    deepest = None
    # The first is the embeddings'.
    for number, names in enumerate(zip(norms[0], norms[1], strict=False)):
        for feeds, wide, narrow in zip(batches, *found, strict=True):
            rows = wide[number][:, : feeds["input_ids"].shape[1]]
            if rows.shape != narrow[number].shape or not np.abs(rows - narrow[number]).max() <= _TOLERANCE:
                return deepest
        deepest = names if number else None
    return deepest


def _values(model: "ModelProto", names: Sequence[str], batches: Sequence[Feeds]) -> list[list[npt.NDArray[np.float32]]]:
    """What each of `names` holds for each batch."""
    import onnx
    import onnxruntime

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    there = {output.name for output in probe.graph.output}
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in there)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of outputs without a type
    run = onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [run.run(list(names), dict(feeds)) for feeds in batches] if names else [[] for _ in batches]


def _joined(wide: "ModelProto", narrow: "ModelProto", common: tuple[str, str], names: tuple[str, str]) -> "ModelProto":
    """`wide` with the nodes of `narrow` above `common`, which read the first T rows there."""
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
    # Of both graphs, and only of one still true.
    del graph.value_info[:]
    return wide


def _above(model: "ModelProto", cut: str) -> list["NodeProto"]:
    """The nodes that the first output needs and `cut` does not, in the graph's order."""
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
    """Whether each output is what its own graph gives."""
    together = session(path)
    for name, graph in graphs.items():
        alone = session(graph)
        for feeds in batches:
            (expected,), (found,) = alone.run(None, dict(feeds)), together.run([name], dict(feeds))
            if found.shape != expected.shape or not np.abs(found - expected).max() <= _TOLERANCE:
                return False
    return True
