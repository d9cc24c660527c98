"""The launcher's inference server loads the text encoders' folders where there is a text bundle, and only there."""

from pathlib import Path

import pytest

from services.stack import Ports, Stack
from services.stack.components.inference_server import InferenceServer


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "inference_server" / "encoder").mkdir(parents=True)
    (folder / "inference_server" / "encoder" / "config.pbtxt").touch()
    return folder


def repositories(state: Path, bundle: Path, text: Path) -> list[str]:
    stack = Stack(state, bundle=bundle, text=text, ports=Ports.free())
    (server,) = [part for part in stack.components.values() if isinstance(part, InferenceServer)]
    arguments = server.launch(stack.place).argv
    assert "--model-config-name" not in " ".join(arguments)
    return [flag.partition("=")[2] for flag in arguments if flag.startswith("--model-repository")]


def test_without_a_text_bundle_the_sequence_encoder_is_alone(tmp_path: Path, bundle: Path) -> None:
    assert repositories(tmp_path / "state", bundle, tmp_path / "none") == [str(bundle / "inference_server")]


def test_a_text_bundles_models_are_loaded_beside_it(tmp_path: Path, bundle: Path) -> None:
    text = tmp_path / "text"
    (text / "inference_server").mkdir(parents=True)
    found = repositories(tmp_path / "state", bundle, text)
    assert found == [str(bundle / "inference_server"), str(text / "inference_server")]
