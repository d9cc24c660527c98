"""The demo's dislike of the best recommendation: similar items fall in the next answer, which has a second page.

The item was seen in training: the encoder does not know newer ones, so disliking one would move no other item.
"""

import time
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from services.offline.demo.calls import Gateway, connected

# Length of the compared answers, number of similar items.
DEPTH, NEAR = 100, 20
PAGE = 10
_SHOWN = 3
_WAIT_S = 10.0


@dataclass(kw_only=True)
class Disliked:
    """Item ids of both answers; `near`: those most similar to the disliked one, best first; seconds: from the
    acknowledgement to the changed answer, None after a timeout.
    """

    item_id: str
    before: list[str]
    near: list[str]
    after: list[str] = field(default_factory=list)
    seconds: float | None = None
    pages: list[list[str]] = field(default_factory=list)

    @property
    def moved(self) -> list[int]:
        """Return the ranks that each of `near` lost, not counting the disliked item; one that the second answer lacks
        has rank DEPTH.
        """
        was, now = (
            {one: rank for rank, one in enumerate(one for one in answer if one != self.item_id)}
            for answer in (self.before, self.after)
        )
        return [now.get(one, DEPTH) - was[one] for one in self.near if one in was]

    def summary(self) -> dict[str, Any]:
        """Return the summary's entry."""
        moved = self.moved if self.seconds is not None else []
        return {
            "item_id": self.item_id,
            "near_in_the_first_answer": len(moved),
            "fallen": sum(places > 0 for places in moved),
            "mean_places": round(sum(moved) / len(moved), 1) if moved else None,
            "seconds_to_the_changed_answer": None if self.seconds is None else round(self.seconds, 3),
            "pages": [len(page) for page in self.pages],
            "items_on_both_pages": len(set.intersection(*map(set, self.pages))) if len(self.pages) == 2 else None,
        }


def dislike_best(
    user_id: str, *, untrained: Set[str], run_id: str, gateway: str, as_of_s: int | None = None
) -> Disliked | None:
    """Dislike the user's best recommendation, if any, that is not in `untrained`, and ask again.

    as_of_s: of the first request, unix seconds, so that only the dislike changes the second answer.
    """
    from freshet.v1 import events_pb2, gateway_pb2

    with connected(gateway) as call:
        before = call.top(user_id, DEPTH, as_of_s)
        best = next((one for one in before if one not in untrained), None)
        if best is None:
            return None
        like_it = gateway_pb2.GatewayServiceSimilarRequest(item_id=best, k=NEAR)
        near = [item.item_id for item in call("Similar", like_it).items]
        found = Disliked(item_id=best, before=before, near=near)
        event = events_pb2.Interaction(
            event_id=f"{run_id}-dislike", user_id=user_id, item_id=found.item_id, type="dislike"
        )
        recorded = call("RecordInteractions", gateway_pb2.RecordInteractionsRequest(interactions=[event]))
        acknowledged = time.monotonic()
        answer = _after(call, user_id, recorded.receipts[0].token)
        if answer is not None:
            found.after, found.seconds = answer, time.monotonic() - acknowledged
            first = call("Recommend", gateway_pb2.RecommendRequest(user_id=user_id, k=PAGE, page_depth=2 * PAGE))
            rest = gateway_pb2.RecommendRequest(user_id=user_id, k=PAGE, page_token=first.next_page_token)
            answers = [first, call("Recommend", rest)] if first.next_page_token else [first]
            found.pages = [[item.item_id for item in one.items] for one in answers]
    return found


def report(found: Disliked, titles: dict[str, str]) -> list[str]:
    """Return the result as sentences."""

    def name(item_id: str) -> str:
        return titles.get(item_id) or item_id

    best = "the best for this person" + (" of what training saw" if found.item_id != found.before[0] else "")
    says = [f"disliked: {name(found.item_id)}, {best}; like it: "
            f"{'; '.join(name(one) for one in found.near[:_SHOWN])}"]  # fmt: skip
    if found.seconds is None:
        return [*says, "the dislike was not in the person's state in time"]
    moved = found.moved
    where = f"{found.seconds * 1000:.0f} ms after the dislike was acknowledged it is not answered again"
    if found.item_id in found.after:
        where = f"{found.seconds * 1000:.0f} ms after the dislike was acknowledged it is still answered"
    if moved:
        where += (
            f"; of the {NEAR} most like it {len(moved)} were among the first {DEPTH}: "
            f"{sum(places > 0 for places in moved)} fell, by {sum(moved) / len(moved):+.1f} places on average"
        )
    else:
        where += f"; of the {NEAR} most like it none was among the first {DEPTH}"
    says.append(where)
    if len(found.pages) == 2:
        first, second = found.pages
        again = len(set(first) & set(second))
        says.append(
            f"page two: {'; '.join(name(one) for one in second[:_SHOWN])} and {max(0, len(second) - _SHOWN)} more, "
            f"{again or 'none'} of page one"
        )
    return says


def _after(call: Gateway, user_id: str, token: Any) -> list[str] | None:
    from freshet.v1 import gateway_pb2

    # Waits until the dislike is in the user's state.
    request = gateway_pb2.RecommendRequest(user_id=user_id, k=DEPTH, freshness_token=token)
    answer = call("Recommend", request, timeout_s=_WAIT_S)
    return [scored.item_id for scored in answer.items] if answer.token_honoured else None
