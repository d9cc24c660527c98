"""Defines the stack's folders: the state folder (.freshet) of a checkout and the user's cache for built recipes.

A recipe (Kafka's jars, an environment, a Redis binary) is built once per content, and clones share the result.
"""

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_STATE = Path(".freshet")


@dataclass(frozen=True)
class StateFolder:
    """A folder with `run/` (pid files, ports), `logs/<name>.log`, `data/<name>/` and `results/`."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @property
    def results(self) -> Path:
        """Results of experiments for the console."""
        return self.root / "results"

    def data(self, name: str) -> Path:
        return self.root / "data" / name

    def make(self) -> None:
        """Create the folders that all components use."""
        for folder in (self.run, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the stack, so that only one launcher at a time changes it."""
        self.run.mkdir(parents=True, exist_ok=True)
        with _locked(self.run / "lock"):
            yield


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return `$XDG_CACHE_HOME/freshet`, by default `~/.cache/freshet`."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "freshet"


def recipe_key(*recipes: Path) -> str:
    """Return a hash (twelve hex digits) of content, Python version and platform."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {sys.platform} {os.uname().machine}".encode())
    for recipe in recipes:
        digest.update(recipe.read_bytes())
    return digest.hexdigest()[:12]


def build_once(folder: Path, build: Callable[[Path], None], *, in_place: bool = False) -> Path:
    """Return `folder`; if it is absent, first fill it with `build(aside)`. A failed build leaves nothing.

    With `in_place`, build at the final path, because a virtual environment contains its own path.
    """
    complete = folder / ".complete"
    if complete.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if complete.exists():
            return folder
        aside = folder if in_place else folder.with_name(f"{folder.name}.building-{os.getpid()}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            build(aside)
            (aside / ".complete").touch()
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        if aside != folder:
            aside.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
