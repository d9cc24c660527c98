"""What feedback changes on the whole stack: a chosen search result, a disliked item, a new item, a forgotten user."""

import time
import uuid
from collections.abc import Iterator

import grpc
import pytest
from freshet.v1 import events_pb2, gateway_pb2
from outside import Outside, event, until

from services.stack import Stack

pytestmark = pytest.mark.integration


@pytest.fixture
def outside(stack: Stack) -> Iterator[Outside]:
    stack.up()
    with Outside(stack) as client:
        yield client


def like(outside: Outside, item: str, k: int) -> list[str]:
    request = gateway_pb2.GatewayServiceSimilarRequest(item_id=item, k=k)
    return [found.item_id for found in outside.gateway.Similar(request, timeout=10).items]


def test_a_chosen_result_changes_the_similarities_of_the_next_search(outside: Outside) -> None:
    user, word = outside.new_user(), outside.bundle.titles[0].split()[1]
    outside.live(user, *outside.items[:12])

    def similarities() -> dict[str, float] | None:
        """None while the generator is late."""
        request = gateway_pb2.GatewayServiceSearchRequest(query=word, user_id=user, k=10)
        try:
            results = outside.gateway.Search(request, timeout=10).results
        except grpc.RpcError:
            return None
        return {one.item_id: found.score for one in results for found in one.found_by if found.source == "mol"}

    before = until("results by words and by the user's state", similarities)
    click = event(user, list(before)[-1], type="search_click", query=word, event_id=f"{user}-click")
    token = outside.record(click)[0].token
    outside.applied((token.partition, token.offset))
    after = until("the same search", similarities)
    assert any(after[item] != before[item] for item in before.keys() & after.keys())


def test_what_is_like_a_disliked_item_falls(outside: Outside) -> None:
    user = outside.new_user()
    outside.live(user, *outside.items[:12])
    before = outside.ids(user, k=100)
    best = before[0]
    token = outside.record(event(user, best, type="dislike"))[0].token
    outside.applied((token.partition, token.offset))
    after = outside.ids(user, k=100)
    assert best not in after
    near = [item for item in like(outside, best, 20) if item in before]
    fell = [(after.index(item) if item in after else len(after)) - before.index(item) for item in near]
    assert len(near) >= 5
    assert sum(fell) > 0


def test_a_new_item_is_served_from_three_users_explained_and_gone_with_one_of_them(outside: Outside) -> None:
    new = f"new-{uuid.uuid4().hex[:8]}"
    outside.gateway.PutItems(gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id=new, title="New")]), timeout=10)
    reader, *early = (outside.new_user() for _ in range(4))
    past = [outside.items[0], *like(outside, outside.items[0], 7)]
    for user in (reader, *early):
        outside.live(user, *past)
    for user in early:
        outside.record(event(user, new, type="rating", value=5.0, at=time.time()))

    def explained() -> gateway_pb2.ExplainResponse | None:
        request = gateway_pb2.ExplainRequest(user_id=reader, item_id=new)
        try:
            answer = outside.gateway.Explain(request, timeout=10)
        except grpc.RpcError:
            return None  # the item has no state
        return answer if answer.similarity.num_interactions else None

    found = until("three users make it known", explained)
    assert found.similarity.num_interactions == 3
    assert found.share_of_model + found.share_of_refreshed + found.share_of_votes == pytest.approx(1)
    until("a reader with the same past gets it", lambda: new in outside.ids(reader, k=50))

    forgotten = outside.gateway.ForgetUser(gateway_pb2.ForgetUserRequest(user_id=early[-1]), timeout=60)
    assert forgotten.is_applied
    assert forgotten.found["summed_interactions"] > 0
    assert set(forgotten.left.values()) == {0}
    assert outside.recommend(early[-1]).state_source == "none"
    until("two users are too few", lambda: explained() is None)
