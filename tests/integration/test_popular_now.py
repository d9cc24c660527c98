"""What people take now is what a stranger is answered with, on the whole stack: new items too, withdrawn ones never."""

import uuid

import pytest
from freshet.v1 import common_pb2, events_pb2, gateway_pb2
from outside import Outside, event, until

from services.stack import Stack

pytestmark = pytest.mark.integration

CROWD = 600


def popular(outside: Outside, k: int, **filters: object) -> list[str]:
    """A stranger's answer."""
    request = gateway_pb2.RecommendRequest(user_id=f"stranger-{uuid.uuid4().hex}", k=k)
    request.filter.CopyFrom(common_pb2.Filter(exclude_seen=True, **filters))
    answer = outside.gateway.Recommend(request, timeout=10)
    assert answer.state_source == "none"
    return [item.item_id for item in answer.items]


def test_a_stranger_is_answered_with_what_people_take_now(stack: Stack) -> None:
    stack.up()
    run = uuid.uuid4().hex[:8]
    new, shown, category = f"new-{run}", f"shown-{run}", f"kind-{run}"
    with Outside(stack) as outside:
        items = [events_pb2.Item(item_id=one, title=one, categories=[category]) for one in (new, shown)]
        outside.gateway.PutItems(gateway_pb2.PutItemsRequest(items=items), timeout=10)
        until("both are known", lambda: set(popular(outside, 2, allow_categories=[category])) == {new, shown})
        before = popular(outside, 1)
        assert before[0] not in (new, shown)

        crowd = [f"crowd-{run}-{number}" for number in range(CROWD)]
        for kind, item in (("impression", shown), ("dislike", shown), ("like", new)):
            outside.record(*(event(user, item, type=kind) for user in crowd))
        until("the new item leads", lambda: popular(outside, 1) == [new])
        # What was only shown, or turned down, is not.
        assert popular(outside, 2, allow_categories=[category]) == [new, shown]
        assert shown not in popular(outside, 100)

        gone = events_pb2.Item(item_id=new, title=new, categories=[category], withdrawn=True)
        outside.gateway.PutItems(gateway_pb2.PutItemsRequest(items=[gone]), timeout=10)
        until("it is gone", lambda: new not in popular(outside, 100))
        assert popular(outside, 2, allow_categories=[category]) == [shown]
