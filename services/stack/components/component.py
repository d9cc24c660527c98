"""The interface to a stack's parts, and shared code."""

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.stack.children import Launch
from services.stack.compose import Service
from services.stack.errors import StackError
from services.stack.folders import StateFolder
from services.stack.ports import Ports

# Called with a part's name and its current step.
Say = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A stack's state, ports, model bundle and text bundle (which may be absent).

    `settings` are environment variables in addition to those in docker-compose.yml.
    """

    state: StateFolder
    ports: Ports
    bundle: Path
    text: Path
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Component(ABC):
    """A part of the stack, with its service of docker-compose.yml."""

    service: Service

    @property
    def name(self) -> str:
        return self.service.name

    def missing(self) -> tuple[str, str] | None:
        """Return what the machine lacks and a command that helps, if anything."""
        return None

    def prepare(self, say: Say) -> None:
        """Fetch and build requirements, once. Raises: StackError if the machine lacks something."""
        if (lacks := self.missing()) is not None:
            raise StackError(self.name, lacks[0], advice=lacks[1])

    @abstractmethod
    def launch(self, place: Place) -> Launch:
        """Write configuration files; return the command."""

    @abstractmethod
    def probe(self, place: Place) -> str | None:
        """Return None if ready, else the reason."""

    @abstractmethod
    def version(self, place: Place) -> str:
        """Return the running version. Raises: StackError if it does not answer."""


def inherited_environment() -> dict[str, str]:
    """Return the environment without Freshet's settings, which come from docker-compose.yml."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")}


def run_installer(
    part: str, argv: Sequence[str], *, advice: str, environment: Mapping[str, str] | None = None, timeout_s: float = 900
) -> None:
    """Run an installer. Raises: StackError with the output's end."""
    try:
        done = subprocess.run(
            argv,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise StackError(part, f"{argv[0]} did not finish within {timeout_s:.0f} s", advice=advice) from exc
    except OSError as exc:
        raise StackError(part, f"cannot execute {argv[0]}: {exc}", advice=advice) from exc
    if done.returncode != 0:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise StackError(part, f"{' '.join(argv[:3])} ... failed:\n" + "\n".join(lines[-12:]), advice=advice)


def uv() -> str | None:
    """Return the path of this environment's uv, else of the uv on PATH, else None."""
    installed = Path(sys.executable).parent / "uv"
    return str(installed) if installed.exists() else shutil.which("uv")


def venv_command(folder: Path) -> list[str]:
    """Return the command that makes an environment at `folder`."""
    program = uv()
    if program is not None:
        return [program, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)]
    return [sys.executable, "-m", "venv", str(folder)]


def install_command(python: str, requirements: Path, target: Path | None = None) -> list[str]:
    """Return the command that installs these packages without dependencies, for `python` or into `target`."""
    program = uv()
    where = [] if target is None else ["--target", str(target)]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    start = pip if program is None else [program, "pip", "install", "--quiet", "--python", python]
    return [*start, "--no-deps", *where, "-r", str(requirements)]
