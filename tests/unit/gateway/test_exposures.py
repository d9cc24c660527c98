"""What was shown: each answer's id and record, what of it was seen, and ids that are altered or somebody else's."""

import base64
from dataclasses import replace

import pytest
from gateway_scene import Scene

from services.algorithms.bundles.event_schema import EventSchema
from services.contracts.topics.interactions import Interaction
from services.gateway.domain import Impression, RecommendQuery, SearchQuery, SimilarQuery
from services.gateway.recommend.exposures import Exposures
from services.platform.errors import InvalidRequest, PermissionDenied, PreconditionFailed


async def shown(scene: Scene, user_id: str = "ann") -> str:
    return (await scene.recommend(RecommendQuery(user_id=user_id, k=3))).exposure_id


async def test_an_answer_is_written_as_it_was_given_for_its_user(scene: Scene) -> None:
    answer = await scene.recommend(RecommendQuery(user_id="ann", k=3, context={"device": "phone"}))
    ((user_id, exposure),) = scene.exposures.written
    assert (user_id, exposure.exposure_id, exposure.surface) == ("ann", answer.exposure_id, "recommend")
    assert list(zip(exposure.item_ids, exposure.scores, exposure.sources, strict=True)) == [
        (item.item_id, item.score, item.source) for item in answer.items
    ]
    assert (exposure.model_version, exposure.index_version) == ("m1", "index-1")
    assert exposure.context == {"device": "phone"}
    assert Exposures(b"key", None).time_of(answer.exposure_id, "ann") == exposure.shown_ms


async def test_searches_and_similar_items_are_exposures_too(scene: Scene) -> None:
    found = await scene.search(SearchQuery(query="space", k=2))
    similar = await scene.handlers.similar(SimilarQuery(item_id="a", user_id="ann", k=2))
    (nobody, search), (ann, like) = scene.exposures.written
    assert (nobody, search.surface, search.exposure_id) == ("", "search", found.exposure_id)
    assert search.text_version == "text-1"
    assert [set(one.split("+")) for one in search.sources] == [
        {rank.source for rank in result.found_by} for result in found.results
    ]
    assert (ann, like.surface, like.exposure_id) == ("ann", "similar", similar.exposure_id)
    assert list(like.item_ids) == [item.item_id for item in similar.found.items]


async def test_what_was_seen_becomes_impressions_of_the_answers_time_and_the_same_ones_again(scene: Scene) -> None:
    exposure_id = await shown(scene)
    seen = [Impression(1, "f"), Impression(3, "d")]
    receipts = await scene.record_impressions("ann", exposure_id, seen)
    again = await scene.record_impressions("ann", exposure_id, seen)
    assert [one.event_id for one in receipts] == [one.event_id for one in again]
    assert [one.token.offset for one in receipts] == [0, 1]
    first, second, *repeated = scene.interactions.written
    assert repeated == [first, second]
    assert first == Interaction(
        user_id="ann",
        item_id="f",
        event_id=receipts[0].event_id,
        type="impression",
        event_time_ms=scene.exposures.written[0][1].shown_ms,
        context={"position": "1"},
        exposure_id=exposure_id,
    )


async def test_an_exposure_of_somebody_else_is_refused(scene: Scene) -> None:
    exposure_id = await shown(scene)
    with pytest.raises(PermissionDenied, match="exposure_id: of an answer to another user"):
        await scene.record_impressions("bob", exposure_id, [Impression(1, "f")])
    click = Interaction(user_id="bob", item_id="f", event_time_ms=1000, type="click", exposure_id=exposure_id)
    fine = replace(click, exposure_id="")
    with pytest.raises(PermissionDenied, match=r"interactions\[1\]\.exposure_id: of an answer to another user"):
        await scene.record([fine, click])
    assert scene.interactions.written == []


async def test_an_altered_exposure_is_refused_wherever_a_bit_is_changed(scene: Scene) -> None:
    raw = base64.urlsafe_b64decode(await shown(scene))
    for at in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        altered = base64.urlsafe_b64encode(changed).decode()
        with pytest.raises(InvalidRequest, match="as an answer of this installation gave it"):
            await scene.record_impressions("ann", altered, [Impression(1, "f")])


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([], "impressions='0 impressions' allowed: 1-1000"),
        ([Impression(0, "f")], r"impressions\[0\].position=0 allowed: 1-10000, each once"),
        ([Impression(1, "f"), Impression(1, "e")], r"impressions\[1\].position=1 allowed: 1-10000, each once"),
        ([Impression(1, "")], r"impressions\[0\].item_id="),
    ],
)
async def test_impressions_that_cannot_be_are_named(seen: list[Impression], said: str, scene: Scene) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await scene.record_impressions("ann", await shown(scene), seen)
    assert scene.interactions.written == []


async def test_a_model_that_takes_impressions_for_something_else_refuses_them() -> None:
    scene = Scene(schema=EventSchema.parse(b"types: {impression: {role: positive}}", "events.yaml"))
    with pytest.raises(PreconditionFailed, match=r"events\.yaml .*'impression' has another role; allowed: exposure"):
        await scene.record_impressions("ann", await shown(scene), [Impression(1, "f")])


async def test_two_answers_to_one_user_have_ids_of_their_own_that_do_not_show_the_user(scene: Scene) -> None:
    first, second = await shown(scene), await shown(scene)
    assert len(first) == len(second) == 32
    tags = [base64.urlsafe_b64decode(one)[10:16] for one in (first, second)]
    assert tags[0] != tags[1]
