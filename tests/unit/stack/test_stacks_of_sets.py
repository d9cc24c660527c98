"""A version set of a local stack is a small stack: whose processes it uses, and that memory is asked first."""

import json
from pathlib import Path

import pytest

from services.stack import Ports, Stack, StackError
from services.stack.version_sets import find_set, new_set, remove_set, set_names, set_parts


@pytest.fixture
def main(tmp_path: Path) -> Stack:
    return Stack(tmp_path / "state", bundle=tmp_path / "first", ports=Ports.free())


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "next"
    folder.mkdir()
    files = {"item_states.safetensors": {"bytes": 300 << 20, "sha256": ""}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    return folder


def test_a_set_has_three_processes_of_its_own_and_shares_the_rest(main: Stack, bundle: Path) -> None:
    own = new_set(main, "next", bundle, None)
    assert set_parts(own) == ("candidates", "reranker", "refresher")
    for part in ("kafka", "redis", "encoder", "gateway"):
        assert own.address(part) == main.address(part)
    for part in set_parts(own):
        assert own.address(part) != main.address(part)
    again = find_set(main, "next")
    assert (again.ports, again.bundle, set_names(main)) == (own.ports, bundle, ["next"])
    remove_set(main, "next")
    assert set_names(main) == []


def test_what_took_the_stack_over_is_its_bundle_until_somebody_names_another(main: Stack, bundle: Path) -> None:
    state = main.place.state.root
    main.place.state.make()
    main.replace_bundle(bundle, ())
    assert Stack(state).bundle == bundle
    main.down()
    assert Stack(state).bundle == bundle
    assert Stack(state, bundle=bundle.parent / "first").bundle == bundle.parent / "first"
    # A set's stack is found by the ports that the main one has now.
    new_set(main, "next", bundle, None)
    elsewhere = Stack(state, ports=Ports.default(offset=7))
    assert find_set(elsewhere, "next").address("redis") == elsewhere.address("redis")


def test_without_memory_for_it_nothing_of_it_is_started(
    main: Stack, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.stack.memory.available_bytes", lambda: 1 << 30)
    own = new_set(main, "next", bundle, None)
    with pytest.raises(StackError, match=rf"{bundle} needs about 3,100 MiB for 3 parts .* 1,024 MiB are available"):
        own.up(set_parts(own))
    assert [part.running for part in own.status() if part.name in set_parts(own)] == [False] * 3
