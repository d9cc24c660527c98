"""The generator's films. Their module imports its neighbours by bare names, from its own folder."""

import sys
from pathlib import Path

from paths import TESTS

sys.path.append(str(TESTS / "unit" / "generator"))

from generator_scene import Running, make_running, write_catalogue, write_text


def films(folder: Path) -> Running:
    """The generator process over seven films, without topics."""
    write_catalogue(folder / "bundle")
    write_text(folder / "text", folder)
    return make_running(folder)


__all__ = ["Running", "films"]
