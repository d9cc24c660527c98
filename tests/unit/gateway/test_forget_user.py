"""Forgetting is written to the log up to its ends, waited for, and reported by what was found and what is left."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest
from freshet.v1 import gateway_pb2
from gateway_scene import Scene
from test_server import gateway

from services.contracts.topics import TOPICS
from services.contracts.topics.forgets import Forget
from services.gateway.domain import RecommendQuery
from services.gateway.ports import Contributions, StoredUser
from services.gateway.write.forget import REMAINS, WITH_USER_DATA, WITHOUT_USER_DATA, ForgetReport, until
from services.platform import request_context
from services.platform.errors import DependencyUnavailable
from services.platform.stream.topic import NUM_PARTITIONS, Topic
from services.user_state.layout import Home, history_key, users_key

FOUND = {
    "history_events": 5,
    "seen_items": 4,
    "query_states": 2,
    "summed_interactions": 7,
    "remembered_interactions": 3,
}
NOTHING = dict.fromkeys(FOUND, 0)
ANN = StoredUser(pseudonym="p-ann", history_events=5, seen_items=4, query_states=2, in_model=True, forgotten_up_to={})


def held(partition: int, interactions: int, remembered: int, up_to: Mapping[int, int]) -> Contributions:
    return Contributions(
        summed_interactions=interactions,
        remembered_interactions=remembered,
        forgotten_up_to=up_to,
        partitions=(partition,),
    )


def scene_with_ann() -> Scene:
    scene = Scene()
    scene.encoder.users["ann"] = ANN
    scene.refreshers.of_users["p-ann"] = [held(0, 6, 1, {}), held(1, 1, 2, {})]
    return scene


def forget_in_encoder(scene: Scene, forget: Forget) -> None:
    scene.encoder.users["ann"] = StoredUser(pseudonym="p-ann", in_model=True, forgotten_up_to=forget.up_to)


def forget_everywhere(scene: Scene, forget: Forget) -> None:
    forget_in_encoder(scene, forget)
    scene.refreshers.of_users["p-ann"] = [held(p, 0, 0, forget.up_to) for p in (0, 1)]


async def forget_within(scene: Scene, seconds: float) -> ForgetReport:
    """What the handler says under a deadline. Over the wire a pause of 0.1 s would be one answer too late."""
    token = request_context.deadline.set(time.monotonic() + seconds)
    try:
        return await scene.forget_user("ann", preview=False)
    finally:
        request_context.deadline.reset(token)


async def test_a_preview_says_what_is_there_and_changes_nothing() -> None:
    scene = scene_with_ann()
    report = await scene.forget_user("ann", preview=True)
    assert report.found == report.left == FOUND
    assert (report.forget_id, report.is_applied, scene.forgets.written) == ("", False, [])
    assert any("weights" in sentence for sentence in report.remains)


async def test_a_forget_voids_up_to_the_ends_of_the_log_and_waits_until_all_have_it() -> None:
    scene = scene_with_ann()
    scene.forgets.on_append = lambda forget: forget_everywhere(scene, forget)
    async with gateway(scene) as stub:
        answer = await stub.ForgetUser(gateway_pb2.ForgetUserRequest(user_id="ann"), timeout=5)
    (forget,) = scene.forgets.written
    assert (forget.user_id, forget.up_to) == ("ann", dict.fromkeys(range(NUM_PARTITIONS), -1) | {3: 8, 4: 1})
    assert (answer.forget_id, answer.is_applied) == (forget.forget_id, True)
    assert (dict(answer.found), dict(answer.left)) == (FOUND, NOTHING)
    assert any("retention" in sentence for sentence in answer.remains)


async def test_the_ends_are_asked_for_after_the_call_began() -> None:
    # An answer that was already on its way may miss what the caller got acknowledged just before.
    scene = scene_with_ann()
    scene.forgets.on_append = lambda forget: forget_everywhere(scene, forget)
    await scene.forget_user("ann", preview=False)
    assert scene.ends.calls == 2


def test_every_topic_is_known_to_hold_something_of_users_or_nothing() -> None:
    names = {topic.name for topic in TOPICS}
    assert names == WITH_USER_DATA.keys() | WITHOUT_USER_DATA
    assert not WITH_USER_DATA.keys() & WITHOUT_USER_DATA


async def test_the_report_says_of_every_topic_until_when_it_holds_what() -> None:
    scene = scene_with_ann()
    remains = (await scene.forget_user("ann", preview=True)).remains
    for name in WITH_USER_DATA:
        (sentence,) = (one for one in remains if one.startswith(f"`{name}` keeps "))
        assert sentence.endswith(
            (
                "stays permanently",
                "records never expire",
                "until the broker compacts the topic",
                "after each was written",
            )
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"retention.ms": "-1"}, "permanently: the topic's records never expire"),
        ({"retention.ms": str(36 * 3600 * 1000)}, "until their retention ends, 1.5 days after each was written"),
        ({}, "until their retention ends, which is the broker's default"),
        ({"cleanup.policy": "compact"}, "until the broker compacts the topic"),
    ],
)
def test_until_when_follows_the_topics_definition(settings: dict[str, str], expected: str) -> None:
    assert until(Topic(name="one", settings=settings)) == expected


@pytest.mark.parametrize("lacking", ["a refresher lags", "a refresher is silent", "a partition is nobody's", "encoder"])
async def test_what_not_every_process_has_applied_when_the_time_is_up_is_not_called_applied(lacking: str) -> None:
    scene = scene_with_ann()

    def apply(forget: Forget) -> None:
        forget_everywhere(scene, forget)
        parts = scene.refreshers.of_users["p-ann"]
        if lacking == "a refresher lags":
            parts[1] = replace(parts[1], forgotten_up_to={3: 8, 4: 0}, summed_interactions=1)
        elif lacking == "a refresher is silent":
            scene.refreshers.all_answer = False
        elif lacking == "a partition is nobody's":
            del parts[1]
        else:
            scene.encoder.users["ann"] = ANN

    scene.forgets.on_append = apply
    report = await forget_within(scene, 0.4)
    assert not report.is_applied
    assert report.forget_id
    assert any("not every refresher" in sentence for sentence in report.remains) == (lacking == "a refresher is silent")


async def test_a_forget_goes_out_while_the_encoder_is_away_and_says_what_is_not_known() -> None:
    scene = scene_with_ann()
    scene.encoder.failure = DependencyUnavailable("encoder: away")
    report = await forget_within(scene, 0.4)
    assert len(scene.forgets.written) == 1
    assert (report.found, report.is_applied) == ({}, False)
    assert any("not known" in sentence for sentence in report.remains)
    with pytest.raises(DependencyUnavailable):
        await scene.forget_user("ann", preview=True)


@pytest.mark.parametrize("slow", ["encoder", "ends"])
async def test_a_part_that_does_not_answer_in_time_leaves_a_report_within_the_deadline(slow: str) -> None:
    scene = scene_with_ann()
    part: Any = getattr(scene, slow)

    def stop(forget: Forget) -> None:
        forget_everywhere(scene, forget)
        part.delay_s = 30.0

    scene.forgets.on_append = stop
    async with gateway(scene) as stub:
        answer = await stub.ForgetUser(gateway_pb2.ForgetUserRequest(user_id="ann"), timeout=1.5)
    assert (answer.is_applied, bool(answer.forget_id)) == (slow == "ends", True)
    assert any("not known" in sentence for sentence in answer.remains) is (slow == "encoder")


async def test_an_encoder_that_never_answers_leaves_time_to_write_the_forget() -> None:
    scene = scene_with_ann()
    scene.encoder.delay_s = 30.0
    async with gateway(scene) as stub:
        answer = await stub.ForgetUser(gateway_pb2.ForgetUserRequest(user_id="ann"), timeout=1.5)
    assert (answer.is_applied, answer.forget_id) == (False, scene.forgets.written[0].forget_id)


def test_the_report_names_the_keys_of_the_state_store_and_the_pseudonyms_that_stay() -> None:
    """Those that hold the user id after a forget: the table of users, and the history's key."""
    home = Home(3, "ann")
    (sentence,) = (one for one in REMAINS if "two keys" in one)
    for key in (users_key(3), history_key(home).removesuffix("ann")):
        assert f"`{key.replace('{p3}', '{pN}')}`" in sentence
    assert any("`refresher-checkpoints` keeps the user's pseudonyms" in one for one in REMAINS)


async def test_answers_that_were_shown_before_a_forget_are_still_listed_as_the_report_says() -> None:
    scene = scene_with_ann()
    await scene.recommend(RecommendQuery(user_id="ann"))
    report = await forget_within(scene, 0.2)
    found = await scene.servicer.ListExposures(gateway_pb2.ListExposuresRequest(user_id="ann"), None)
    assert len(found.answers) == 1
    (sentence,) = (one for one in report.remains if one.startswith("`exposures` keeps "))
    assert "`ListExposures` and `GetExposure` still return it" in sentence


@pytest.mark.parametrize("part", ["forgets", "ends"])
async def test_without_the_log_nothing_is_forgotten_and_the_caller_is_told_to_retry(part: str) -> None:
    scene = scene_with_ann()
    getattr(scene, part).failure = DependencyUnavailable("away")
    async with gateway(scene) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ForgetUser(gateway_pb2.ForgetUserRequest(user_id="ann"), timeout=2)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("retry-after-ms", "500") in [(key, value) for key, value in caught.value.trailing_metadata() or ()]
    assert scene.forgets.written == []
