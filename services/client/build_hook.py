"""Build hook of hatchling: makes the gRPC stubs, which only this distribution ships."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):  # type: ignore[misc]
    """Runs before every sdist, wheel and editable install. An unpacked sdist has the stubs already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        stubs = root / "freshet"
        if not stubs.is_dir():
            repository = root.parents[1]
            sys.path.insert(0, str(repository / "deploy"))
            from build_stubs import build_stubs

            build_stubs(repository)
            stubs = repository / "stubs" / "freshet"
        if version != "editable":
            build_data["force_include"][str(stubs)] = "freshet"
        if self.target_name == "sdist":
            config = Path("freshet_client", "service_config.json")
            build_data["force_include"][str((root / config).resolve())] = str(config)
