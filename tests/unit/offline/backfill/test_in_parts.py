"""Parts of a job without a cluster: each once, in their order; and what is said of a worker that cannot be used."""

import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from services.algorithms.bundles.model_bundle import load_bundle
from services.offline.backfill.in_parts import _on_worker, run_parts
from services.offline.bundles.model import write_bundle
from services.platform.errors import PreconditionFailed
from services.stack.version import freshet_version
from tests.unit.bundle.bundle_scene import content


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", content()).path


def test_each_part_is_done_once_in_its_order(bundle: Path) -> None:
    done: list[tuple[int, int]] = []
    run_parts({3: partial(pow, 3, 2), 1: partial(pow, 5, 2)}, lambda *one: done.append(one), bundle=bundle)
    assert done == [(3, 9), (1, 25)]


def test_a_part_that_fails_ends_the_run_and_what_was_done_was_handed_over(bundle: Path) -> None:
    done: list[tuple[int, int]] = []
    calls = {0: partial(int, "1"), 1: partial(int, "x"), 2: partial(int, "2")}
    with pytest.raises(ValueError, match="'x'"):
        run_parts(calls, lambda *one: done.append(one), bundle=bundle)
    assert done == [(0, 1)]


def test_without_ray_it_says_what_to_install(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PreconditionFailed, match=r"needs the package ray: pip install 'freshet-recsys\[ray\]'"):
        run_parts({0: partial(int, "1")}, lambda *one: None, bundle=bundle, on="ray://127.0.0.1:10001")


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_does_not_answer_is_named_within_seconds(bundle: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"ray://127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PreconditionFailed, match=rf"no Ray cluster at '{address}' .*allowed: ray://HOST:10001"):
            run_parts({0: partial(int, "1")}, lambda *one: None, bundle=bundle, on=address)
    assert time.monotonic() - began < 30


def refusal(bundle: Path, version: str, model: str) -> str:
    """What a worker answers in the place of a result."""
    found = _on_worker(partial(int, "1"), bundle, version, model)
    assert isinstance(found, PreconditionFailed)
    return found.message.removeprefix(f"Ray worker on {socket.gethostname()}: ")


def test_a_worker_without_the_bundle_says_where_and_what_to_do(bundle: Path, tmp_path: Path) -> None:
    model, elsewhere = load_bundle(bundle).model_version, tmp_path / "nothing"
    assert _on_worker(partial(int, "1"), bundle, freshet_version(), model) == 1
    said = refusal(elsewhere, freshet_version(), model)
    assert said.startswith(f"no bundle at {elsewhere} (")
    assert said.endswith(f": copy the one of model {model} there")


def test_a_worker_with_another_model_or_version_is_refused(bundle: Path, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", content(seed=1))
    model, mine = load_bundle(bundle).model_version, freshet_version()
    assert refusal(other.path, mine, model).startswith(f"model {other.model_version} at {other.path}, not {model}: ")
    assert refusal(bundle, "9.9", model).startswith(f"runs freshet-recsys {mine}, this command 9.9: ")
