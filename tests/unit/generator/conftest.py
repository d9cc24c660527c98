"""The films' bundles, written once: nobody changes them."""

from pathlib import Path

import pytest
from generator_scene import write_catalogue, write_text


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `bundle` and `text`."""
    folder = tmp_path_factory.mktemp("films")
    write_catalogue(folder / "bundle")
    write_text(folder / "text", folder)
    return folder
