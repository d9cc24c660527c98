"""Downloads, from a real web server on loopback: kept when whole, refused when broken, given up on when away."""

import functools
import http.server
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.offline.datasets.locate import Locator
from services.offline.datasets.movielens import read_movielens


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    return folder


@pytest.fixture
def url(published: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=str(published))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/{{name}}.zip"
        server.shutdown()
        thread.join()


def locator(tmp_path: Path, url: str) -> Locator:
    return Locator(environ={"XDG_CACHE_HOME": str(tmp_path / "cache")}, publisher_url=url)


def test_a_whole_zip_is_kept_in_the_cache(
    tmp_path: Path, published: Path, url: str, write_ml_1m: Callable[[Path], Path]
) -> None:
    folder = write_ml_1m(tmp_path / "ml-32m")
    with zipfile.ZipFile(published / "ml-32m.zip", "w") as archive:
        for entry in folder.iterdir():
            archive.write(entry, f"ml-32m/{entry.name}")
    searching = locator(tmp_path, url)
    found = searching.from_publisher("ml-32m")
    assert found is not None
    assert "downloaded from its publisher" in found.where
    assert len(read_movielens(found.path, name="ml-32m")) == 4
    cached = locator(tmp_path, "http://127.0.0.1:1/{name}.zip").on_this_machine("ml-32m")
    assert cached is not None
    assert cached.where == "in the local cache"


@pytest.mark.parametrize("content", [b"not a zip", b""])
def test_a_broken_download_leaves_nothing_behind(tmp_path: Path, published: Path, url: str, content: bytes) -> None:
    (published / "ml-1m.zip").write_bytes(content)
    searching = locator(tmp_path, url)
    assert searching.from_publisher("ml-1m") is None
    assert "download of http://127.0.0.1" in searching.tried[0]
    assert list(searching.cache_dir().iterdir()) == []


def test_a_set_that_is_not_published_does_not_stop_the_search(
    tmp_path: Path, published: Path, url: str, write_ml_1m: Callable[[Path], Path]
) -> None:
    folder = write_ml_1m(tmp_path / "ml-100k")
    with zipfile.ZipFile(published / "ml-100k.zip", "w") as archive:
        archive.write(folder / "ratings.dat", "ml-100k/ratings.dat")
    searching = locator(tmp_path, url)
    assert searching.from_publisher("ml-1m") is None
    assert "HTTP Error 404" in searching.tried[0]
    assert searching.from_publisher("ml-100k") is not None


def test_an_absent_publisher_is_asked_once(tmp_path: Path) -> None:
    searching = locator(tmp_path, "http://127.0.0.1:1/{name}.zip")
    assert searching.from_publisher("ml-1m") is None
    assert searching.from_publisher("ml-100k") is None
    assert len(searching.tried) == 1
