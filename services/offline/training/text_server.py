"""The inference server's model folders of a text bundle: `text` and `phrases`, for the parts that the bundle has.

Each is the template of deploy/inference_server with the part's own graph, and names the text version that it serves
(the generator process checks). Both run one file on the Python backend. It knows neither models nor training.
"""

import tempfile
from pathlib import Path

from services.algorithms.text_bundle import (
    INFERENCE_SERVER,
    PHRASE_ENCODER,
    PHRASES,
    TEXT_ENCODER,
    TEXT_MOL,
    TextBundle,
    add_text_files,
    load_text_bundle,
)
from services.offline.training.onnx_graphs import ExportError

TEMPLATES = Path(__file__).parents[3] / "deploy" / "inference_server"
# Part -> the server's model and the graph that it runs.
_MODELS = {TEXT_MOL: ("text", TEXT_ENCODER), PHRASES: ("phrases", PHRASE_ENCODER)}
_PROGRAM = "text/1/model.py"


def add_server_folders(path: Path | str, *, templates: Path = TEMPLATES) -> TextBundle:
    """Put the server's folders into a sealed text bundle; its version stays.

    Raises: BundleError if it is none; ExportError if a template is missing.
    """
    bundle = load_text_bundle(path, verify=False)
    sources: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in bundle.parts:
            name, graph = _MODELS[part]
            for template in ("config.pbtxt", "configs/onnxruntime.pbtxt", "configs/onnxruntime-gpu.pbtxt"):
                source = templates / name / template
                if not source.is_file():
                    raise ExportError(f"{source} is missing; it is the inference server's model configuration")
                named = Path(scratch) / f"{name}-{source.name}"
                write_named(source, named, "text_version", bundle.text_version)
                sources[f"{INFERENCE_SERVER}/{name}/{template}"] = named
            sources[f"{INFERENCE_SERVER}/{name}/1/model.py"] = templates / _PROGRAM
            sources[f"{INFERENCE_SERVER}/{name}/1/model.onnx"] = bundle.file(graph)
        if not (templates / _PROGRAM).is_file():
            raise ExportError(f"{templates / _PROGRAM} is missing; it is the model that the inference server runs")
        return add_text_files(bundle.path, sources) if sources else bundle


def write_named(source: Path, target: Path, key: str, version: str) -> None:
    """A model configuration that names the version which it serves (the process that asks checks it)."""
    stanza = f'parameters {{ key: "{key}" value: {{ string_value: "{version}" }} }}\n'
    target.write_text(source.read_text(encoding="utf-8") + stanza, encoding="utf-8")
