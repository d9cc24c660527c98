"""An item that nobody knew: put, liked by three people, found by a fourth, explained; then one of them is forgotten.

Choosing the people is a pure function of who liked what. What happens then are real calls of the running gateway; the
three are just enough for the item to be served, so that forgetting one of them takes it away again.

Letters: X items, d width.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.algorithms.bundle import Bundle
from services.cli.commands import explain, forget
from services.offline.demo.calls import connected

TOP = 50
# The operator's default: an item that rests on fewer people is not served from interactions alone.
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
    """near: the anchor and the items most like it; early: who will like the new item first; readers: who should find
    it. Everybody here recently liked at least three of `near`."""

    anchor: str
    near: Sequence[str]
    early: Sequence[str]
    readers: Sequence[str]


def item_vectors(bundle: Bundle) -> npt.NDArray[np.float32]:
    """What items are compared by, (X, d): their components' average, at unit length."""
    average = bundle.item_states.components.mean(axis=1)
    return np.asarray(average / np.maximum(np.linalg.norm(average, axis=1, keepdims=True), 1e-12), np.float32)


def choose_scene(
    item_ids: Sequence[str], vectors: npt.NDArray[np.float32], liked: Mapping[str, Sequence[str]]
) -> Scene | None:
    """The neighbourhood that most of the users like, of those around their most frequent items; None when it has
    fewer than four users. `liked`: item ids per user, oldest first; vectors (X, d).
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
    """What became of the new item. found_s: from its third interaction to a reader's top; None: not in time."""

    item_id: str
    title: str
    reader: str = ""
    found_s: float | None = None
    rank: int | None = None
    explanation: dict[str, Any] | None = None
    forgotten: dict[str, Any] | None = None
    forget_s: float | None = None
    # Whether the reader's top no longer has it, after one of three was forgotten; None: not looked.
    gone: bool | None = None
    forgotten_state_source: str = ""

    def summary(self) -> dict[str, Any]:
        """For the demo's summary; user ids stay out of it."""
        explained = self.explanation
        return {
            "item_id": self.item_id,
            "title": self.title,
            "interactions": NUM_EARLY,
            "found_after_seconds": None if self.found_s is None else round(self.found_s, 3),
            "rank": self.rank,
            "score": None if explained is None else explained["score"],
            "shares": None if explained is None else explained["shares"],
            "gone_after_forgetting_one_of_three": self.gone,
        }

    def forget_summary(self) -> dict[str, Any] | None:
        """What forgetting reported; None when nobody was forgotten."""
        if self.forgotten is None:
            return None
        kept = {name: self.forgotten[name] for name in ("found", "left", "is_applied", "remains")}
        return kept | {"seconds": self.forget_s, "state_source_afterwards": self.forgotten_state_source}


def arrive(scene: Scene, *, run_id: str, title: str, categories: Sequence[str], gateway: str) -> Newcomer:
    """Put the item, let the early ones like it, and ask the readers until one has it among their top."""
    from freshet.v1 import events_pb2, gateway_pb2

    newcomer = Newcomer(item_id=f"{run_id}-new", title=title)
    item = events_pb2.Item(item_id=newcomer.item_id, title=title, categories=categories)
    with connected(gateway) as call:
        call("PutItems", gateway_pb2.PutItemsRequest(items=[item]))
        for number, user in enumerate(scene.early):
            liked = events_pb2.Interaction(
                event_id=f"{run_id}-new-{number}", user_id=user, item_id=newcomer.item_id, type="rating", value=5.0
            )
            call("RecordInteractions", gateway_pb2.RecordInteractionsRequest(interactions=[liked]))
        third = time.monotonic()
        while newcomer.rank is None and time.monotonic() - third < _WAIT_S:
            for reader in scene.readers:
                top = call.top(reader, TOP)
                if newcomer.item_id in top:
                    newcomer.reader, newcomer.rank = reader, top.index(newcomer.item_id) + 1
                    newcomer.found_s = time.monotonic() - third
                    break
            else:
                time.sleep(_LOOK_AGAIN_S)
        if newcomer.rank is not None:
            request = gateway_pb2.ExplainRequest(user_id=newcomer.reader, item_id=newcomer.item_id, max_pairs=3)
            newcomer.explanation = explain.as_dict(
                call("Explain", request), user=newcomer.reader, item=newcomer.item_id
            )
    return newcomer


def forget_one(scene: Scene, newcomer: Newcomer, *, gateway: str) -> None:
    """Forget the last of the three, and look whether the item, which now rests on two, is gone again."""
    from freshet.v1 import gateway_pb2

    user = scene.early[-1]
    with connected(gateway) as call:
        began = time.monotonic()
        answer = call("ForgetUser", gateway_pb2.ForgetUserRequest(user_id=user), timeout_s=30.0)
        newcomer.forget_s = round(time.monotonic() - began, 3)
        newcomer.forgotten = forget.as_dict(answer, user=user, preview=False)
        afterwards = call("Recommend", gateway_pb2.RecommendRequest(user_id=user, k=10))
        newcomer.forgotten_state_source = afterwards.state_source
        if newcomer.rank is None:
            return
        newcomer.gone = False
        while not newcomer.gone and time.monotonic() - began < _WAIT_S:
            newcomer.gone = newcomer.item_id not in call.top(newcomer.reader, TOP)
            if not newcomer.gone:
                time.sleep(_LOOK_AGAIN_S)


def arrival(news: Newcomer) -> list[str]:
    """How finding the item went, as sentences."""
    if news.rank is None or news.found_s is None or news.explanation is None:
        return [f"{news.title}: in nobody's top {TOP} after {_WAIT_S:.0f} s"]
    explained = news.explanation
    shares = ", ".join(f"{name} {share:.0%}" for name, share in explained["shares"].items())
    own = ", ".join(past["title"] or past["item_id"] for past in explained["history"][:3])
    voters = "; ".join(f"{voters['count']} x {voters['type']}" for voters in explained["votes"]["voters"])
    return [
        f"{news.title}: rank {news.rank} for user {news.reader}, {news.found_s:.1f} s after its third interaction",
        f"why: score {explained['score']:.3f} ({shares}); voted: {voters or 'nobody'}; the user's last: {own}",
    ]


def forgetting(news: Newcomer) -> list[str]:
    """What was found and left of the forgotten user, and of the item, as sentences."""
    report = news.forgotten
    if report is None:
        return []
    found = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in report["found"].items())
    left = sum(report["left"].values())
    source = _SOURCES[news.forgotten_state_source]
    said = [f"found: {found}; left: {left} after {news.forget_s:.1f} s; the next answer is from {source}"]
    if news.gone is not None:
        said.append(
            "the item rests on two people now and is served no more"
            if news.gone
            else f"the item is still served after {_WAIT_S:.0f} s"
        )
    return said


_SOURCES = {
    "none": "popular items, nothing is known",
    "stored": "a stored state",
    "stored_history": "the stored history",
    "request": "the request",
}
