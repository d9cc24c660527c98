"""How long somebody has been away, on both profiles: the answers, the explanation and the pages of one person."""

from typing import Any

import pytest
from freshet.v1 import gateway_pb2
from google.protobuf.timestamp_pb2 import Timestamp
from outside import Outside

from services.stack import Stack

pytestmark = pytest.mark.integration

LAST_S = 1_000_000_000
AWAY_S = {0: 0, 1_023: 0, 1_024: 1, 5_000: 3, 100_000: 7, 10**8: 17}


@pytest.mark.parametrize("profile", ["stack", "compact_stack"])
def test_answers_are_as_of_their_requests(profile: str, request: pytest.FixtureRequest) -> None:
    stack: Stack = request.getfixturevalue(profile)
    with Outside(stack) as outside:
        assert outside.bundle.absence is not None
        user, items = outside.new_user(), outside.items[:12]
        outside.live(user, *items, start=LAST_S - 60 * (len(items) - 1))
        stored = outside.stored_components(user)

        def as_of(away_s: int) -> gateway_pb2.RecommendResponse:
            return outside.recommend(user, 20, as_of=Timestamp(seconds=LAST_S + away_s))

        def others(_: gateway_pb2.RecommendResponse) -> tuple[Any, Any, Any]:
            # Without `as_of` the clock counts: a quarter of a century is the last bucket.
            now = outside.recommend(user, 20, page_depth=40)
            asked = gateway_pb2.ExplainRequest(user_id=user, item_id=now.items[0].item_id)
            return {away_s: as_of(away_s) for away_s in AWAY_S}, now, outside.gateway.Explain(asked, timeout=10)

        _, (found, now, explained) = outside.unmoved(lambda: as_of(0), others)
        assert {away_s: (one.state_source, one.absence_bucket) for away_s, one in found.items()} == {
            away_s: ("stored", bucket) for away_s, bucket in AWAY_S.items()
        }
        answers = {away_s: [(item.item_id, item.score) for item in one.items] for away_s, one in found.items()}
        assert answers[0] == answers[1_023]
        # What training saw moves the state.
        learnt = [away_s for away_s, bucket in AWAY_S.items() if outside.bundle.absence.components[bucket].any()]
        assert learnt
        assert all(answers[away_s] != answers[0] for away_s in learnt)
        assert [(item.item_id, item.score) for item in now.items] == answers[10**8]
        second = outside.recommend(user, 20, page_token=now.next_page_token, as_of=Timestamp(seconds=LAST_S))
        assert (now.absence_bucket, second.absence_bucket, second.state_source) == (17, 17, "page")
        assert explained.absence_bucket == 17
        assert explained.score == pytest.approx(now.items[0].score, abs=1e-5)
        # Reading changed nothing.
        assert outside.stored_components(user) == stored
