"""Find a named data set on this machine, or download MovieLens from its publisher.

It searches FRESHET_DATA, ../shared/data beside the working folder and the repository, and the local cache, then
downloads into the cache.
"""

import os
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .movielens import is_movielens
from .sequences import SEQUENCE_NAMES, is_sequences

PUBLISHER_URL = "https://files.grouplens.org/datasets/movielens/{name}.zip"
CONNECT_TIMEOUT_S = 8.0
_CHUNK_BYTES = 1 << 20
# ml-32m's zip is about 240 MB.
_MAX_DOWNLOAD_BYTES = 1 << 30


class DatasetUnavailableError(ValueError):
    """A named set is neither on this machine nor at its publisher; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A set's folder or zip, and its location in words ("in FRESHET_DATA (...)")."""

    path: Path
    where: str


@dataclass(kw_only=True, slots=True)
class Locator:
    """Searches for data sets. `root`: the only folder to search, if given. `download`: whether to use the network.
    `tried`: failed searches and downloads, in words.
    """

    root: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    download: bool = True
    publisher_url: str = PUBLISHER_URL
    tried: list[str] = field(default_factory=list)
    _publisher_down: bool = False

    def on_this_machine(self, name: str) -> Located | None:
        """Return the first local folder or zip with `name`, if any."""
        is_the_set = is_sequences if name in SEQUENCE_NAMES else is_movielens
        for base, label in self.folders():
            for candidate in (base / name, base / f"{name}.zip", base):
                # The folder may be the set itself: FRESHET_DATA=/somewhere/ml-1m or .../ml-1m.zip.
                if candidate == base and base.name not in (name, f"{name}.zip"):
                    continue
                if is_the_set(candidate):
                    return Located(path=candidate, where=f"in {label}")
            self.tried.append(f"{label} has no {name}")
        return None

    def file(self, name: str) -> Path:
        """Return a file of the local folders. Raises: DatasetUnavailableError with the folders searched."""
        tried = []
        for base, label in self.folders():
            if (base / name).is_file():
                return base / name
            tried.append(label)
        raise DatasetUnavailableError(f"{name} is not on this machine; looked in {', '.join(tried)}; set FRESHET_DATA")

    def from_publisher(self, name: str) -> Located | None:
        """Download a MovieLens set into the cache; if that is impossible, return None and add a sentence to `tried`."""
        if self.root is not None or not self.download or self._publisher_down or name in SEQUENCE_NAMES:
            return None
        url = self.publisher_url.format(name=name)
        target = self.cache_dir() / f"{name}.zip"
        try:
            _fetch(url, target)
        except (OSError, zipfile.BadZipFile, ValueError) as exc:
            # An unreachable publisher: skip later downloads.
            self._publisher_down = isinstance(exc, OSError) and not isinstance(exc, urllib.error.HTTPError)
            self.tried.append(f"download of {url} failed ({exc})")
            return None
        return Located(path=target, where=f"downloaded from its publisher ({url})")

    def cache_dir(self) -> Path:
        """Return XDG_CACHE_HOME/freshet/data, by default ~/.cache/freshet/data."""
        base = self.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if base else Path.home() / ".cache") / "freshet" / "data"

    def folders(self) -> Iterator[tuple[Path, str]]:
        """Yield local folders in search order, each with a description."""
        if self.root is not None:
            yield self.root, str(self.root)
            return
        configured = self.environ.get("FRESHET_DATA", "")
        if configured:
            yield Path(configured).expanduser(), f"FRESHET_DATA ({configured})"
        yield Path("..") / "shared" / "data", "../shared/data"
        yield Path(__file__).resolve().parents[3].parent / "shared" / "data", "../shared/data of the repository"
        yield self.cache_dir(), "the local cache"


def _fetch(url: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, aside_name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.", suffix=".part")
    aside = Path(aside_name)
    try:
        with os.fdopen(handle, "wb") as out, urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as response:
            received = 0
            while chunk := response.read(_CHUNK_BYTES):
                received += len(chunk)
                if received > _MAX_DOWNLOAD_BYTES:
                    raise ValueError(f"the answer is larger than {_MAX_DOWNLOAD_BYTES} bytes")
                out.write(chunk)
        with zipfile.ZipFile(aside) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise zipfile.BadZipFile(f"{broken} has a wrong checksum")
        if not is_movielens(aside):
            raise ValueError("the zip holds no MovieLens rating file")
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
