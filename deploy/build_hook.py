"""What an install builds first, for hatchling: the CPU kernels."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_kernels import build_kernels


class InstallHook(BuildHookInterface):  # type: ignore[misc]
    """Runs before every wheel and editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_kernels(Path(self.root))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
