"""`freshet-client` keeps its promises on both profiles of the real system, and over a gateway that is killed."""

import re
import threading

import pytest
from client_suite import *  # noqa: F403
from client_suite import Scene, until
from freshet_client import AsyncClient, Client, Unavailable

from services.algorithms.bundles.model_bundle import load_bundle
from services.stack import Stack
from services.stack.folders import REPOSITORY

PAIRS, KILLS = 300, 3


@pytest.fixture(scope="module", params=["split", "compact"])
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def running(request: pytest.FixtureRequest, profile: str) -> Stack:
    return request.getfixturevalue("stack" if profile == "split" else "compact_stack")


@pytest.fixture
def scene(running: Stack):
    address = running.address("gateway")
    with Client(address) as client:
        yield Scene(client, list(load_bundle(running.bundle).item_ids), lambda: AsyncClient(address))


def test_writes_are_reflected_or_said_not_to_be_while_the_gateway_dies(
    running: Stack, scene: Scene, profile: str
) -> None:
    sessions = [scene.client.session(scene.new_user()) for _ in range(50)]
    recorded: dict[str, list[str]] = {session.user_id: [] for session in sessions}
    outcomes = {"reflected": 0, "said not": 0}
    refused = 0

    def persist(call):
        """Again until the gateway is back: a write keeps its event id, so it counts once."""
        nonlocal refused
        for _ in range(2_000):
            try:
                return call()
            except Unavailable:
                refused += 1
                threading.Event().wait(0.05)
        raise AssertionError("the gateway did not come back")

    killed: list[threading.Thread] = []
    for pair in range(PAIRS):
        if pair % (PAIRS // KILLS) == PAIRS // (KILLS + 1):
            for one in killed:
                one.join()
            running.kill("gateway")
            killed.append(threading.Thread(target=running.start, args=("gateway",)))
            killed[-1].start()
        session = sessions[pair % len(sessions)]
        item_id = scene.items[pair // len(sessions) * 7 % 300]
        event_id = f"{session.user_id}-{pair}"
        persist(lambda: session.record(item_id, "like", event_id=event_id))  # noqa: B023
        recorded[session.user_id].append(item_id)
        answer = persist(lambda: session.recommend(k=50))  # noqa: B023
        position = answer.provenance.state_position
        if answer.token_honoured:
            outcomes["reflected"] += 1
            assert not set(answer.item_ids) & set(recorded[session.user_id])
            assert position is not None
            assert position.partition == session.token.partition
            assert position.offset >= session.token.offset
        else:
            outcomes["said not"] += 1
            assert "token_not_honoured" in answer.degradations
    for one in killed:
        one.join()
    print(f"{profile}: {outcomes}, {refused} calls were Unavailable and repeated")  # noqa: T201
    assert sum(outcomes.values()) == PAIRS
    assert outcomes["reflected"] > PAIRS / 2
    for session in sessions:
        assert until(lambda: session.recommend().token_honoured)  # noqa: B023
        known = [past.item_id for past in session.explain(scene.items[350]).history]
        assert known == recorded[session.user_id][:-11:-1]


def test_a_gateway_that_restarts_between_two_pages_goes_on_with_the_list(running: Stack, scene: Scene) -> None:
    session = scene.client.session(scene.known_user())
    first = session.recommend(k=5, page_depth=15)
    running.stop("gateway")
    with pytest.raises(Unavailable, match=f"^nothing answers at {running.address('gateway')}: "):
        session.next_page()
    running.start("gateway")
    rest = [page.item_ids for page in iter(session.next_page, None)]
    assert [len(page) for page in rest] == [5, 5]
    assert len({*first.item_ids, *rest[0], *rest[1]}) == 15


def test_the_guides_first_example_prints_what_it_promises(
    running: Stack, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (REPOSITORY / "docs" / "guide" / "clients.md").read_text(encoding="utf-8")
    example = text.split("```python\n", 1)[1].split("```", 1)[0]
    ours = {"127.0.0.1:50050": running.address("gateway"), "1217": scene.known_user(), "661": scene.items[0]}
    for written, one in ours.items():
        assert f'"{written}"' in example
        example = example.replace(f'"{written}"', f'"{one}"')
    exec(example, {})
    *items, provenance, page, score = capsys.readouterr().out.splitlines()
    assert len(items) == 3
    assert " exact " in provenance
    assert re.fullmatch(r"\[('[^']+',? ?){3}\]", page), page
    assert float(score)
