"""The newest sets are handed over once the topic was read to its end, after each operation, and again on failure."""

import pytest
from fakes.stream import MemoryTopics

from services.contracts.operation_log import OperationFollower
from services.contracts.operations import Operation
from services.contracts.topics.version_sets import OPERATIONS, VERSION_SETS, VersionSet, VersionSets, encode_operation
from services.platform.errors import DependencyUnavailable
from services.platform.stream import topic_follower


class Scene:
    def __init__(self) -> None:
        self.topics = MemoryTopics({VERSION_SETS: 1})
        self.given: list[tuple[int, str]] = []
        self.ready, self.fails = 0, False
        self.follower = OperationFollower(OPERATIONS, self.topics, self.take, on_ready=self.is_ready)

    def take(self, sets: VersionSets) -> None:
        if self.fails:
            raise DependencyUnavailable("no memory for the set")
        self.given.append((sets.revision, sets.serving))

    def is_ready(self) -> None:
        self.ready += 1

    def operate(self, revision: int, serving: str) -> None:
        after = VersionSets(
            revision=revision,
            sets={serving: VersionSet(name=serving, model_version=serving, bundle="")},
            serving=serving,
            before="",
            canary=None,
            shadow=None,
            salt="",
        )
        made = Operation(after=after, operation="promote", operator="op", operation_id=f"o{revision}", time_ms=1)
        self.topics.write(VERSION_SETS, None, encode_operation(made))

    def remake(self, *servings: str) -> None:
        """Another topic of the same name, with these operations."""
        self.topics.logs[VERSION_SETS] = [[]]
        for revision, serving in enumerate(servings, start=1):
            self.operate(revision, serving)

    def step(self) -> None:
        """A turn, and what its thread does when it fails."""
        try:
            self.follower.step()
        except DependencyUnavailable as exc:
            self.follower.fail(exc)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(topic_follower, "_LOOK_EVERY_S", 0.0)
    found = Scene()
    found.follower._first_backoff_s = found.follower._backoff_s = 0.0
    return found


def test_the_newest_sets_alone_are_handed_over_at_first_and_then_each(scene: Scene) -> None:
    for revision, serving in enumerate(("a", "b", "c"), start=1):
        scene.operate(revision, serving)
    scene.step()
    assert (scene.given, scene.ready) == ([(3, "c")], 1)
    scene.operate(4, "a")
    scene.topics.write(VERSION_SETS, None, b"\xff")
    scene.operate(4, "b")  # of two operators at once the first one's counts
    scene.step()
    scene.step()
    assert (scene.given, scene.ready) == ([(3, "c"), (4, "a")], 1)


def test_without_an_operation_it_is_ready_and_nothing_is_handed_over(scene: Scene) -> None:
    scene.step()
    assert (scene.given, scene.ready) == ([], 1)


def test_what_could_not_be_taken_is_handed_over_again(scene: Scene) -> None:
    scene.operate(1, "a")
    scene.fails = True
    for _ in range(3):
        scene.step()
    assert (scene.given, scene.ready) == ([], 0)
    scene.fails = False
    scene.step()
    assert (scene.given, scene.ready) == ([(1, "a")], 1)


@pytest.mark.parametrize("servings", ["x", "xy", "xyz"], ids=["shorter", "as long", "longer"])
def test_of_a_topic_made_anew_the_sets_of_the_new_one_hold(scene: Scene, servings: str) -> None:
    scene.operate(1, "a")
    scene.operate(2, "b")
    scene.step()
    scene.remake(*servings)
    scene.step()
    scene.step()
    scene.operate(len(servings) + 1, "z")
    for _ in range(3):
        scene.step()
    assert scene.given[0] == (2, "b")
    assert scene.given[-1] == (len(servings) + 1, "z")
