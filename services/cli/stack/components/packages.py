"""Python packages for the recipes: by uv where the project's environment has it, else by venv and pip."""

import shutil
import sys
from pathlib import Path


def uv() -> str | None:
    """The uv of the running environment, or on the path."""
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else shutil.which("uv")


def venv_command(folder: Path) -> list[str]:
    """Make an environment of the running Python at `folder`."""
    program = uv()
    if program is not None:
        return [program, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)]
    return [sys.executable, "-m", "venv", str(folder)]


def install_command(python: str) -> list[str]:
    """Install into the environment of `python`; arguments follow."""
    program = uv()
    if program is not None:
        return [program, "pip", "install", "--quiet", "--python", python]
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
