"""Follow a new item: it is put, found by its title, liked by three users, found by a fourth user, and explained; then
one of the three is forgotten.

The choice of users is a pure function of their liked items; the rest are real calls of the gateway. Three users are
the minimum to serve the item from interactions: after one is forgotten, it is served by its title alone.

Letters: X items, d width.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from freshet.v1 import events_pb2, gateway_pb2
from freshet_client import FreshetError

from services.algorithms.bundles.model_bundle import Bundle
from services.offline.demo.calls import Gateway, connected

TOP = 50
# An item with only a title is searched in so many recommendations of a reader.
DEPTH = 200
# The refresher's default: a new item with fewer users is not served from interactions.
NUM_EARLY = 3
_MAX_READERS = 8
_NEAR = 8
_NEAR_LIKED = 3
_RECENT = 30
_ANCHORS = 100
_WAIT_S = 15.0
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Scene:
    """near: the anchor and the items most like it; early: users who will like the new item first; readers: users
    who should find it. All these users recently liked at least three items of `near`.
    """

    anchor: str
    near: Sequence[str]
    early: Sequence[str]
    readers: Sequence[str]


def item_vectors(bundle: Bundle) -> npt.NDArray[np.float32]:
    """Return vectors to compare items by, (X, d): their components' average, at unit length."""
    average = bundle.item_states.components.mean(axis=1)
    return np.asarray(average / np.maximum(np.linalg.norm(average, axis=1, keepdims=True), 1e-12), np.float32)


def choose_scene(
    item_ids: Sequence[str], vectors: npt.NDArray[np.float32], liked: Mapping[str, Sequence[str]]
) -> Scene | None:
    """Return the scene of the frequent item whose neighbourhood the most users like; None if fewer than four do.

    `liked`: item ids per user, oldest first; vectors (X, d).
    """
    row_of = {item_id: row for row, item_id in enumerate(item_ids)}
    recent = {user: {row_of[i] for i in items[-_RECENT:] if i in row_of} for user, items in liked.items()}
    frequent = Counter(row for rows in recent.values() for row in rows)
    best: tuple[int, Scene] | None = None
    for anchor, _ in sorted(frequent.items(), key=lambda entry: (-entry[1], item_ids[entry[0]]))[:_ANCHORS]:
        near = np.argsort(-(vectors @ vectors[anchor]), kind="stable")[:_NEAR].tolist()
        shared = {user: len(rows.intersection(near)) for user, rows in recent.items()}
        fans = sorted((u for u, count in shared.items() if count >= _NEAR_LIKED), key=lambda u: (-shared[u], u))
        if len(fans) > NUM_EARLY and (best is None or len(fans) > best[0]):
            scene = Scene(
                anchor=item_ids[anchor],
                near=[item_ids[row] for row in near],
                early=fans[:NUM_EARLY],
                readers=fans[NUM_EARLY : NUM_EARLY + _MAX_READERS],
            )
            best = (len(fans), scene)
    return None if best is None else best[1]


@dataclass(kw_only=True)
class Newcomer:
    """titled_s: seconds from the put until the item is in a reader's first `DEPTH` recommendations, by its title alone;
    found_s: seconds from its third interaction until it is in a reader's first `TOP`, by interactions. None: timeout.
    """

    item_id: str
    title: str
    titled_reader: str = ""
    titled_rank: int | None = None
    titled_s: float | None = None
    reader: str = ""
    found_s: float | None = None
    rank: int | None = None
    explanation: gateway_pb2.ExplainResponse | None = None
    forgotten: gateway_pb2.ForgetUserResponse | None = None
    forget_s: float | None = None
    # Whether its interactions lost their effect after one of three users was forgotten; None: not checked.
    gone: bool | None = None
    # Whether the reader's top still has it.
    stays_by_title: bool = False
    forgotten_state_source: str = ""

    def summary(self) -> dict[str, Any]:
        """Return the summary's entry, without user ids."""
        explained = self.explanation
        return {
            "item_id": self.item_id,
            "title": self.title,
            "rank_by_title": self.titled_rank,
            "found_by_title_after_seconds": None if self.titled_s is None else round(self.titled_s, 3),
            "interactions": NUM_EARLY,
            "found_after_seconds": None if self.found_s is None else round(self.found_s, 3),
            "rank": self.rank,
            "score": None if explained is None else explained.score,
            "shares": None if explained is None else _shares(explained),
            "gone_after_forgetting_one_of_three": self.gone,
        }

    def forget_summary(self) -> dict[str, Any] | None:
        """Return the report of the forget, if any."""
        report = self.forgotten
        if report is None:
            return None
        return {
            "found": dict(sorted(report.found.items())),
            "left": dict(sorted(report.left.items())),
            "is_applied": report.is_applied,
            "remains": list(report.remains),
            "seconds": self.forget_s,
            "state_source_afterwards": self.forgotten_state_source,
        }


def arrive(
    scene: Scene, *, run_id: str, title: str, categories: Sequence[str], gateway: str, wait_s: float = _WAIT_S
) -> Newcomer:
    """Put the item, let the early users like it, and ask until a reader's top has it."""
    newcomer = Newcomer(item_id=f"{run_id}-new", title=title)
    item = events_pb2.Item(item_id=newcomer.item_id, title=title, categories=categories)
    with connected(gateway) as call:
        call("PutItems", gateway_pb2.PutItemsRequest(items=[item]))
        put = time.monotonic()
        while newcomer.titled_rank is None and time.monotonic() - put < wait_s:
            found = _found(call, newcomer.item_id, scene.readers, DEPTH)
            if found is not None:
                newcomer.titled_reader, newcomer.titled_rank = found
                newcomer.titled_s = time.monotonic() - put
        for number, user in enumerate(scene.early):
            liked = events_pb2.Interaction(
                event_id=f"{run_id}-new-{number}", user_id=user, item_id=newcomer.item_id, type="rating", value=5.0
            )
            call("RecordInteractions", gateway_pb2.RecordInteractionsRequest(interactions=[liked]))
        third = time.monotonic()
        while newcomer.rank is None and time.monotonic() - third < wait_s:
            found = _found(call, newcomer.item_id, scene.readers, TOP)
            if found is None:
                continue
            explanation = _explained(call, found[0], newcomer.item_id)
            if explanation is not None and explanation.similarity.num_interactions >= NUM_EARLY:
                newcomer.reader, newcomer.rank = found
                newcomer.explanation, newcomer.found_s = explanation, time.monotonic() - third
    return newcomer


def forget_one(scene: Scene, newcomer: Newcomer, *, gateway: str) -> None:
    """Forget the last of the three, and check that the item, with two contributors left, has only its title."""
    user = scene.early[-1]
    with connected(gateway) as call:
        began = time.monotonic()
        newcomer.forgotten = call("ForgetUser", gateway_pb2.ForgetUserRequest(user_id=user), timeout_s=30.0)
        newcomer.forget_s = round(time.monotonic() - began, 3)
        afterwards = call("Recommend", gateway_pb2.RecommendRequest(user_id=user, k=10))
        newcomer.forgotten_state_source = afterwards.state_source
        if newcomer.rank is None:
            return
        newcomer.gone = False
        while not newcomer.gone and time.monotonic() - began < _WAIT_S:
            newcomer.stays_by_title = newcomer.item_id in call.top(newcomer.reader, TOP)
            explanation = _explained(call, newcomer.reader, newcomer.item_id) if newcomer.stays_by_title else None
            newcomer.gone = explanation is None or explanation.similarity.num_interactions == 0
            if not newcomer.gone:
                time.sleep(_LOOK_AGAIN_S)


def _found(call: Gateway, item_id: str, readers: Sequence[str], depth: int) -> tuple[str, int] | None:
    """The first reader with the item in the first `depth`, and the item's rank; else None, after a short sleep."""
    for reader in readers:
        top = call.top(reader, depth)
        if item_id in top:
            return reader, top.index(item_id) + 1
    time.sleep(_LOOK_AGAIN_S)
    return None


def _explained(call: Gateway, reader: str, item_id: str) -> gateway_pb2.ExplainResponse | None:
    """The explanation; None if the call fails, for example because the item no longer has a state."""
    request = gateway_pb2.ExplainRequest(user_id=reader, item_id=item_id, max_pairs=3)
    try:
        answer: gateway_pb2.ExplainResponse = call("Explain", request)
    except FreshetError:
        return None
    return answer


def _shares(explained: gateway_pb2.ExplainResponse) -> dict[str, float]:
    names = ("model", "refreshed", "votes")
    return {name: getattr(explained, f"share_of_{name}") for name in names}


def arrival(news: Newcomer) -> list[str]:
    """Return how the item was found, as sentences."""
    says = [f"{news.title}: nobody has touched it; by its title it is among nobody's first {DEPTH}"]
    if news.titled_rank is not None and news.titled_s is not None:
        says = [
            f"{news.title}: nobody has touched it; by its title at rank {news.titled_rank} for user "
            f"{news.titled_reader}, {news.titled_s * 1000:.0f} ms after it was put"
        ]
    if news.rank is None or news.found_s is None or news.explanation is None:
        return [*says, f"liked by {NUM_EARLY}: in nobody's top {TOP} after {_WAIT_S:.0f} s"]
    explained = news.explanation
    shares = ", ".join(f"{name} {share:.0%}" for name, share in _shares(explained).items())
    own = ", ".join(past.title or past.item_id for past in explained.history[:3])
    voters = "; ".join(f"{voters.count} x {voters.type}" for voters in explained.votes.voters)
    return [
        *says,
        f"liked by {NUM_EARLY}: rank {news.rank} for user {news.reader}, {news.found_s:.1f} s after the third",
        f"why: score {explained.score:.3f} ({shares}); voted: {voters or 'nobody'}; the user's last: {own}",
    ]


def forgetting(news: Newcomer) -> list[str]:
    """Return the result of the forget, as sentences."""
    report = news.forgotten
    if report is None:
        return []
    found = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(report.found.items()))
    left = sum(report.left.values())
    source = _SOURCES[news.forgotten_state_source]
    lines = [f"found: {found}; left: {left} after {news.forget_s:.1f} s; the next answer is from {source}"]
    if news.gone is not None:
        lines.append(
            f"the item is still served from three people's interactions after {_WAIT_S:.0f} s"
            if not news.gone
            else "the item rests on two people now: its title speaks for it again"
            if news.stays_by_title
            else "the item rests on two people now and is served no more"
        )
    return lines


_SOURCES = {
    "none": "popular items, nothing is known",
    "stored": "a stored state",
    "stored_history": "the stored history",
    "request": "the request",
}
