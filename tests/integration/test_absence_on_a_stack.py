"""How long somebody has been away, on both profiles: the answers, the explanation and the pages of one person."""

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
        answers = {}
        for away_s, bucket in AWAY_S.items():
            answer = outside.recommend(user, 20, as_of=Timestamp(seconds=LAST_S + away_s))
            assert (answer.state_source, answer.absence_bucket) == ("stored", bucket)
            answers[away_s] = [(item.item_id, item.score) for item in answer.items]
        assert answers[0] == answers[1_023]
        # What training saw moves the state.
        learnt = [away_s for away_s, bucket in AWAY_S.items() if outside.bundle.absence.components[bucket].any()]
        assert learnt
        assert all(answers[away_s] != answers[0] for away_s in learnt)
        # Without `as_of` the clock counts: a quarter of a century is the last bucket.
        now = outside.recommend(user, 20, page_depth=40)
        assert [(item.item_id, item.score) for item in now.items] == answers[10**8]
        second = outside.recommend(user, 20, page_token=now.next_page_token, as_of=Timestamp(seconds=LAST_S))
        assert (now.absence_bucket, second.absence_bucket, second.state_source) == (17, 17, "page")
        best = now.items[0]
        explained = outside.gateway.Explain(gateway_pb2.ExplainRequest(user_id=user, item_id=best.item_id), timeout=10)
        assert explained.absence_bucket == 17
        assert explained.score == pytest.approx(best.score, abs=1e-5)
        # Reading changed nothing.
        assert outside.stored_components(user) == stored
