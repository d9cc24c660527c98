"""What people look at: details beside an answer, the catalogue, and what is stored of a user."""

import re

import pytest
from freshet.v1 import common_pb2, gateway_pb2
from gateway_scene import CATEGORIES, COUNTS, ITEMS, STORED, Scene

from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import CatalogueItem
from services.gateway.describe import users
from services.gateway.domain import ExplainQuery, HistoryEvent, RecommendQuery
from services.gateway.edge.roles import Role
from services.gateway.recommend.popular import PopularItems
from services.platform import request_context
from services.platform.errors import DependencyUnavailable, InvalidRequest, PermissionDenied
from services.platform.stream.records import SourceRecord


async def test_details_stand_beside_the_items_where_they_are_asked_for() -> None:
    scene = Scene(popular=PopularItems(ITEMS, COUNTS, CATEGORIES, titles=["A", "B", "C", "D", "E", ""]))
    request = gateway_pb2.RecommendRequest(user_id="ann", k=2)
    plain = await scene.servicer.Recommend(request, None)
    request.with_details = True
    described = await scene.servicer.Recommend(request, None)
    assert [(one.item_id, one.title, list(one.categories)) for one in plain.items] == [("f", "", []), ("e", "", [])]
    assert [(one.item_id, one.title, list(one.categories)) for one in described.items] == [
        ("f", "", []),
        ("e", "E", ["z"]),
    ]


async def test_the_catalogue_counts_categories_as_they_are_now(scene: Scene) -> None:
    withdrawn = CatalogueItem(item_id="b", categories=("y", "new"), withdrawn=True)
    scene.popular.describe([withdrawn, CatalogueItem(item_id="g", categories=("new",))])
    found = await scene.servicer.DescribeCatalogue(gateway_pb2.DescribeCatalogueRequest(), None)
    # Before: x has a, b, d; y has c, d; z has e.
    assert [(one.name, one.items) for one in found.categories] == [("y", 3), ("new", 2), ("x", 2), ("z", 1)]
    assert (found.items, found.withdrawn_items, found.num_categories, found.model_version) == (7, 1, 4, "m1")
    assert [(one.name, one.kind) for one in found.attributes] == [("price", "number"), ("maker", "tag")]
    meanings = {one.type: (one.role, one.seen, one.history) for one in found.event_types}
    assert meanings["like"] == ("positive", True, True)
    assert meanings["impression"] == ("exposure", False, False)
    few = await scene.servicer.DescribeCatalogue(gateway_pb2.DescribeCatalogueRequest(max_categories=2), None)
    assert [one.name for one in few.categories] == ["y", "new"]
    assert few.num_categories == 4


async def test_a_user_is_described_newest_first_and_page_by_page(scene: Scene) -> None:
    scene.states.histories["ann"] = [
        HistoryEvent("a", 1_000, "rating", 5.0),
        HistoryEvent("b", 2_000, "rating", 1.0),
        HistoryEvent("c", 3_000, "dislike"),
        HistoryEvent("gone", 4_500, ""),
    ]
    whole = await scene.servicer.GetUser(gateway_pb2.GetUserRequest(user_id="ann"), None)
    assert [(one.item_id, one.title, one.type, one.value, one.role) for one in whole.events] == [
        ("gone", "", "interaction", 0.0, "positive"),
        ("c", "C", "dislike", 0.0, "negative"),
        ("b", "B", "rating", 1.0, "negative"),
        ("a", "A", "rating", 5.0, "positive"),
    ]
    assert [one.event_time.ToMilliseconds() for one in whole.events] == [4_500, 3_000, 2_000, 1_000]
    assert (whole.num_events, whole.model_version, whole.state_reaches_history) == (4, "m1", True)
    assert whole.state_position == common_pb2.StreamPosition(partition=STORED.partition, offset=STORED.offset)
    assert whole.state_time.ToMilliseconds() == STORED.applied_ms
    request = gateway_pb2.GetUserRequest(user_id="ann", max_events=2, skip_events=1)
    assert [one.item_id for one in (await scene.servicer.GetUser(request, None)).events] == ["c", "b"]


async def test_states_of_the_served_model_are_read(scene: Scene) -> None:
    await scene.recommend(RecommendQuery(user_id="ann"))
    await scene.explain(ExplainQuery(user_id="ann", item_id="b"))
    await scene.servicer.GetUser(gateway_pb2.GetUserRequest(user_id="ann"), None)
    assert scene.states.calls >= 3
    assert scene.states.models == {"m1"}


async def test_an_unknown_user_has_nothing_and_a_store_that_is_away_is_an_error(scene: Scene) -> None:
    nobody = await scene.servicer.GetUser(gateway_pb2.GetUserRequest(user_id="nobody"), None)
    assert (list(nobody.events), nobody.num_events, nobody.num_seen) == ([], 0, 0)
    assert not nobody.HasField("state_position")
    assert not nobody.state_reaches_history
    scene.states.failure = DependencyUnavailable("away")
    with pytest.raises(DependencyUnavailable, match="away"):
        await scene.servicer.GetUser(gateway_pb2.GetUserRequest(user_id="ann"), None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user_id": ""}, "user_id="),
        ({"user_id": "x" * 129}, "user_id="),
        ({"user_id": "ann", "max_events": 1001}, "max_events=1001 allowed: 0-1000"),
        ({"user_id": "ann", "skip_events": 100_001}, "skip_events=100001 allowed: 0-100000"),
    ],
)
async def test_a_bad_look_at_a_user_is_refused_by_name(fields: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await Scene().servicer.GetUser(gateway_pb2.GetUserRequest(**fields), None)


async def test_too_many_categories_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="max_categories=10001 allowed: 0-10000"):
        await Scene().servicer.DescribeCatalogue(gateway_pb2.DescribeCatalogueRequest(max_categories=10_001), None)


async def test_what_was_shown_to_a_user_is_listed_newest_first_and_found_by_its_id(scene: Scene) -> None:
    ids = []
    for k in (1, 2, 3):
        answer = await scene.servicer.Recommend(
            gateway_pb2.RecommendRequest(user_id="ann", k=k, context={"surface": "tv"}), None
        )
        ids.append(answer.exposure_id)
    await scene.servicer.Recommend(gateway_pb2.RecommendRequest(user_id="bob", k=1), None)
    listed = await scene.servicer.ListExposures(gateway_pb2.ListExposuresRequest(user_id="ann", max_answers=2), None)
    assert [one.exposure_id for one in listed.answers] == ids[:0:-1]
    assert not listed.is_complete
    newest = listed.answers[0]
    assert [(one.item_id, one.title) for one in newest.items] == [
        (one.item_id, one.item_id.upper()) for one in answer.items
    ]
    assert [one.score for one in newest.items] == pytest.approx([one.score for one in answer.items])
    assert (newest.surface, newest.model_version, dict(newest.context)) == ("recommend", "m1", {"surface": "tv"})
    request = gateway_pb2.GetExposureRequest(user_id="ann", exposure_id=ids[0])
    assert len((await scene.servicer.GetExposure(request, None)).answer.items) == 1
    request.user_id = "bob"
    with pytest.raises(PermissionDenied, match="exposure_id: of an answer to another user"):
        await scene.servicer.GetExposure(request, None)
    request.exposure_id = "made up"
    with pytest.raises(InvalidRequest, match="exposure_id="):
        await scene.servicer.GetExposure(request, None)
    with pytest.raises(InvalidRequest, match="max_answers=101 allowed: 0-100"):
        await scene.servicer.ListExposures(gateway_pb2.ListExposuresRequest(user_id="ann", max_answers=101), None)


async def test_the_tail_has_the_newest_interaction_of_each_partition_and_pseudonyms_without_support(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(partition: int, offset: int, value: bytes) -> None:
        scene.ends.ends[partition] = offset + 1
        scene.ends.stored[partition, offset] = SourceRecord(INTERACTIONS, partition, offset, 5_000, b"ann", value)

    monkeypatch.setattr(users, "_EVERY_S", 0.0)
    for roles in (None, {Role.SUPPORT}, {Role.OPERATOR}):
        request_context.roles.set(None if roles is None else frozenset(roles))
        stream = scene.servicer.TailInteractions(gateway_pb2.TailInteractionsRequest(), None)
        assert await anext(stream) == gateway_pb2.TailInteractionsResponse()
        first = scene.ends.ends[3]
        write(3, first + 2, encode_interaction(Interaction(user_id="ann", item_id="b", type="like", value=2.0)))
        write(4, scene.ends.ends[4], b"torn")
        found = await anext(stream)
        (one,) = found.interactions
        assert (one.item_id, one.title, one.type, one.value, found.left_out) == ("b", "B", "like", 2.0, 3)
        assert one.written_time.ToMilliseconds() == 5_000
        assert (one.user_id == "ann") == (roles != {Role.OPERATOR})
        scene.ends.failure = DependencyUnavailable("away")
        with pytest.raises(DependencyUnavailable):
            await anext(stream)
        scene.ends.failure = None
    assert re.fullmatch("[0-9a-f]{32}", one.user_id)


@pytest.mark.parametrize(
    "value",
    [
        encode_interaction(Interaction(user_id="ann", item_id="x" * 129, type="like")),
        rb'{"user_id": "\ud800", "item_id": "b", "type": "like"}',
        b"",
    ],
    ids=["too long", "not UTF-8", "empty"],
)
async def test_a_record_that_the_encoder_rejects_is_left_out_of_the_tail(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    monkeypatch.setattr(users, "_EVERY_S", 0.0)
    stream = scene.servicer.TailInteractions(gateway_pb2.TailInteractionsRequest(), None)
    await anext(stream)
    offset = scene.ends.ends[3]
    scene.ends.ends[3] = offset + 1
    scene.ends.stored[3, offset] = SourceRecord(INTERACTIONS, 3, offset, 5_000, b"ann", value)
    assert await anext(stream) == gateway_pb2.TailInteractionsResponse(left_out=1)


async def test_the_tail_begins_where_a_new_partition_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_EVERY_S", 0.0)
    stream = scene.servicer.TailInteractions(gateway_pb2.TailInteractionsRequest(), None)
    await anext(stream)
    scene.ends.ends[9] = 1 << 33
    offset = scene.ends.ends[3]
    scene.ends.ends[3] = offset + 1
    value = encode_interaction(Interaction(user_id="ann", item_id="b", type="like"))
    scene.ends.stored[3, offset] = SourceRecord(INTERACTIONS, 3, offset, 5_000, b"ann", value)
    found = await anext(stream)
    assert ([one.item_id for one in found.interactions], found.left_out) == (["b"], 0)


@pytest.mark.parametrize("why", ["stops", "five minutes"])
async def test_the_tail_ends_when_the_gateway_stops_and_after_five_minutes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(users, "_EVERY_S", 0.0)
    stream = scene.servicer.TailInteractions(gateway_pb2.TailInteractionsRequest(), None)
    await anext(stream)
    if why == "stops":
        scene.servicer.stops = lambda: True
    else:
        monkeypatch.setattr(users, "_LONGEST_S", 0.0)
        stream = scene.servicer.TailInteractions(gateway_pb2.TailInteractionsRequest(), None)
        await anext(stream)
    assert await anext(stream, None) is None
