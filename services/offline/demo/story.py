"""The demo's steps after the stream: real calls of the gateway that show what one user, and one new item, get.

A user searches, chooses a result, searches again, and dislikes the best recommendation. A new item is put, is found by
its title, is liked by three users and explained to a fourth one; then one of the three is forgotten. The users, the
item and the word are pure functions of the data.

Letters: X items, d width.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from freshet.v1 import events_pb2, gateway_pb2
from freshet_client import Client, FreshetError

from services.algorithms.bundles.model_bundle import Bundle
from services.offline.demo.plan import ReplayEvent

# A new item with fewer users is not served from interactions (the refresher's default).
NUM_EARLY = 3
_TOP, _DEPTH = 50, 100  # recommendations: searched for the new item; compared before and after a dislike
_PAGE, _NEAR, _RESULTS, _SHOWN = 10, 20, 10, 3
_RECENT = 30  # a user's last items
_EVENTS_WANTED = 10
_PAST_WANTED = range(20, 151)
_TITLES_WANTED = range(5, 60)
_MIN_LETTERS = 4
_SCENE_ITEMS, _SCENE_LIKED, _MAX_READERS, _ANCHORS = 8, 3, 8, 100
_CALL_S, _WAIT_S, _LOOK_AGAIN_S = 10.0, 15.0, 0.05
# The first search connects to the generator, which may exceed a source's time limit.
_PATIENCE_S = 30.0

Summary = dict[str, Any]


class Person(NamedTuple):
    """items: of the past and of the replay, oldest first; last_s: time of the last event, unix seconds."""

    user_id: str
    items: list[str]
    last_s: int


def choose_person(events: Sequence[ReplayEvent], past: Mapping[str, Sequence[str]]) -> Person | None:
    """Return the user with about ten events among those with 20 to 150 past items, else among all with a past, if any.

    `past`: item ids before the split, oldest first.
    """
    counts = Counter(event.user_id for event in events)
    for sizes in (_PAST_WANTED, range(1, 10**9)):
        known = [user for user in counts if len(past.get(user, ())) in sizes]
        if known:
            chosen = min(known, key=lambda user: (abs(counts[user] - _EVENTS_WANTED), user))
            own = [event for event in events if event.user_id == chosen]
            return Person(chosen, [*past[chosen], *(event.item_id for event in own)], own[-1].time_s)
    return None


def choose_query(titles: Mapping[str, str], history: Sequence[str]) -> str | None:
    """Return the word in most titles of the user's recent items, among words of 5 to 59 titles; None if no word fits.

    `history`: item ids, oldest first.
    """
    all_titles = Counter(word for title in titles.values() for word in set(_words(title)))
    mine = Counter(word for item_id in history[-_RECENT:] for word in set(_words(titles.get(item_id, ""))))
    fitting = [word for word in mine if all_titles[word] in _TITLES_WANTED]
    return min(fitting, key=lambda word: (-mine[word], -all_titles[word], word), default=None)


class Scene(NamedTuple):
    """early: the three users who will like the new item; readers: users who should find it."""

    anchor: str
    early: Sequence[str]
    readers: Sequence[str]


def choose_scene(
    item_ids: Sequence[str], vectors: npt.NDArray[np.float32], liked: Mapping[str, Sequence[str]]
) -> Scene | None:
    """Return the scene of the frequent item for which the most users recently liked three of its eight nearest items.

    `liked`: item ids per user, oldest first; vectors (X, d). None if fewer than four users did.
    """
    row_of = {item_id: row for row, item_id in enumerate(item_ids)}
    recent = {user: {row_of[i] for i in items[-_RECENT:] if i in row_of} for user, items in liked.items()}
    frequent = Counter(row for rows in recent.values() for row in rows)
    best: Scene | None = None
    most = NUM_EARLY
    for anchor, _ in sorted(frequent.items(), key=lambda entry: (-entry[1], item_ids[entry[0]]))[:_ANCHORS]:
        near = np.argsort(-(vectors @ vectors[anchor]), kind="stable")[:_SCENE_ITEMS].tolist()
        shared = {user: len(rows.intersection(near)) for user, rows in recent.items()}
        fans = sorted((u for u, count in shared.items() if count >= _SCENE_LIKED), key=lambda u: (-shared[u], u))
        if len(fans) > most:
            most = len(fans)
            best = Scene(item_ids[anchor], fans[:NUM_EARLY], fans[NUM_EARLY : NUM_EARLY + _MAX_READERS])
    return best


class Story:
    """Makes the calls and reports each result with `say`. A method returns its summary, without user ids."""

    def __init__(self, client: Client, bundle: Bundle, run_id: str, say: Callable[[str], None]) -> None:
        self._client, self._bundle, self._run_id, self._say = client, bundle, run_id, say
        self._titles = dict(zip(bundle.item_ids, bundle.titles, strict=True))

    def search(self, person: Person) -> Summary | None:
        """Search for a word of the user's titles, choose the last result, and search again after the choice is applied.

        Return None if no word fits.
        """
        query = choose_query(self._titles, person.items)
        if query is None:
            self._say("no word of this user's titles is in a few others: left out")
            return None
        before = self._search(query, person.user_id)
        ranks = [result.item_id for result in before.results]
        sources = [spent.source for spent in before.sources if not spent.failure]
        self._say(
            f"{query!r} finds {len(ranks)} items for user {person.user_id} by {', '.join(sources)} in "
            f"{before.total_ms:.0f} ms: {self._named(ranks)}"
        )
        found: Summary = {"query": query, "found": len(ranks), "sources": sources, "chosen": None}
        if not ranks:
            return found
        chosen = found["chosen"] = ranks[-1]
        self._say(f"chosen: {self._name(chosen)}, at rank {len(ranks)}")
        seconds = self._record(person.user_id, chosen, "search_click", query=query)
        after = self._search(query, person.user_id)
        now = [result.item_id for result in after.results]
        was_similar, similar = _similarities(before), _similarities(after)
        rescored = sum(similar.get(one, value) != value for one, value in was_similar.items())
        moved = sum(now[rank : rank + 1] != [one] for rank, one in enumerate(ranks))
        where = f"at rank {now.index(chosen) + 1}" if chosen in now else f"not among the first {_RESULTS}"
        self._say(
            f"{seconds * 1000:.0f} ms after the choice was acknowledged it is {where}; "
            f"{moved} of {len(ranks)} ranks and {rescored} similarities changed"
        )
        return found | {"moved": moved, "rescored": rescored, "seconds_to_the_changed_answer": round(seconds, 3)}

    def dislike(self, person: Person) -> Summary | None:
        """Dislike the best recommendation that training saw, and compare the next answer; then ask for its second page.

        The encoder does not know newer items, so disliking one would move no other item. Return None without such a
        recommendation.
        """
        # As of the user's last event, so that only the dislike changes the second answer.
        before = self._top(person.user_id, _DEPTH, as_of_s=person.last_s)
        best = next((one for one in before if one not in self._bundle.untrained), None)
        if best is None:
            self._say("no recommendation of an item that training saw: left out")
            return None
        like_it = gateway_pb2.GatewayServiceSimilarRequest(item_id=best, k=_NEAR)
        near = [item.item_id for item in self._call("Similar", like_it).items]
        self._say(f"disliked: {self._name(best)}, the best that training saw; like it: {self._named(near)}")
        seconds = self._record(person.user_id, best, "dislike")
        after = self._top(person.user_id, _DEPTH)
        was, now = ([one for one in answer if one != best] for answer in (before, after))
        moved = [(now.index(one) if one in now else _DEPTH) - was.index(one) for one in near if one in was]
        mean = round(sum(moved) / len(moved), 1) if moved else None
        fell = f": {sum(by > 0 for by in moved)} fell, by {mean:+} ranks on average" if moved else ""
        self._say(
            f"{seconds * 1000:.0f} ms after the dislike was acknowledged it is {'still' if best in after else 'not'} "
            f"recommended; of the {_NEAR} most like it {len(moved)} were among the first {_DEPTH}{fell}"
        )
        first = self._call("Recommend", _recommend(person.user_id, _PAGE, page_depth=2 * _PAGE))
        second = self._call("Recommend", _recommend(person.user_id, _PAGE, page_token=first.next_page_token))
        pages = [[item.item_id for item in page.items] for page in (first, second)]
        again = len(set(pages[0]) & set(pages[1]))
        self._say(f"page two: {self._named(pages[1])}; {again or 'none'} of its {len(pages[1])} items are on page one")
        return {
            "item_id": best,
            "near_in_the_first_answer": len(moved),
            "mean_places": mean,
            "seconds_to_the_changed_answer": round(seconds, 3),
            "items_on_both_pages": again,
        }

    def new_item(self, scene: Scene) -> Summary:
        """Put an item, let three users like it, and wait until a reader's recommendations have it."""
        item_id, title = f"{self._run_id}-new", f"New: for who likes {self._name(scene.anchor)}"
        categories = self._bundle.categories[self._bundle.item_index[scene.anchor]]
        item = events_pb2.Item(item_id=item_id, title=title, categories=categories)
        self._call("PutItems", gateway_pb2.PutItemsRequest(items=[item]))
        put = time.monotonic()
        titled = next(self._finds(scene.readers, item_id, 2 * _DEPTH), None)
        says = f"{title}: no interaction yet; by its title no reader has it among the first {2 * _DEPTH}"
        if titled is not None:
            milliseconds = 1000 * (time.monotonic() - put)
            says = (
                f"{title}: by its title at rank {titled[1]} for user {titled[0]}, {milliseconds:.0f} ms after the put"
            )
        self._say(says)
        third = put
        for user in scene.early:
            seconds = self._record(user, item_id, "rating", value=5.0)
            third = time.monotonic() - seconds
        found: Summary = {
            "item_id": item_id,
            "title": title,
            "rank_by_title": titled and titled[1],
            "found_after_seconds": None,
            "rank": None,
            "shares": None,
        }
        for reader, rank in self._finds(scene.readers, item_id, _TOP):
            explained = self._explain(reader, item_id)
            if explained is None or explained.similarity.num_interactions < NUM_EARLY:
                continue
            seconds = time.monotonic() - third
            shares = {name: getattr(explained, f"share_of_{name}") for name in ("model", "refreshed", "votes")}
            self._say(f"liked by {NUM_EARLY}: rank {rank} for user {reader}, {seconds:.1f} s after the third")
            parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            voters = "; ".join(f"{voters.count} x {voters.type}" for voters in explained.votes.voters)
            self._say(f"why: score {explained.score:.3f} ({parts}); voted: {voters or 'nobody'}")
            return found | {"found_after_seconds": round(seconds, 3), "rank": rank, "shares": shares}
        self._say(f"liked by {NUM_EARLY}: no reader has it in the top {_TOP} after {_WAIT_S:.0f} s")
        return found

    def forget(self, scene: Scene, item_id: str) -> Summary:
        """Forget the last of the three users; the item, with two contributors left, then has only its title."""
        began = time.monotonic()
        report = self._call("ForgetUser", gateway_pb2.ForgetUserRequest(user_id=scene.early[-1]), timeout_s=_PATIENCE_S)
        seconds = round(time.monotonic() - began, 3)
        source = self._call("Recommend", _recommend(scene.early[-1], _PAGE)).state_source
        counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(report.found.items()))
        self._say(
            f"found: {counts}; left: {sum(report.left.values())} after {seconds:.1f} s; "
            f"the source of the next answer's state: {source}"
        )
        gone = False
        while not gone and time.monotonic() - began < _WAIT_S:
            explained = self._explain(scene.readers[0], item_id)
            gone = explained is None or explained.similarity.num_interactions == 0
            time.sleep(0 if gone else _LOOK_AGAIN_S)
        self._say(f"the new item is {'no longer' if gone else 'still'} served from interactions")
        return {
            "found": dict(sorted(report.found.items())),
            "left": dict(sorted(report.left.items())),
            "is_applied": report.is_applied,
            "remains": list(report.remains),
            "seconds": seconds,
            "state_source_afterwards": source,
            "new_item_without_interactions": gone,
        }

    def _call(self, method: str, request: Any, *, timeout_s: float = _CALL_S) -> Any:
        return self._client.call(method, request, timeout_s=timeout_s)

    def _search(self, query: str, user_id: str) -> gateway_pb2.GatewayServiceSearchResponse:
        request = gateway_pb2.GatewayServiceSearchRequest(query=query, user_id=user_id, k=_RESULTS)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._call("Search", request)  # type: ignore[no-any-return]
            except FreshetError as error:
                if not error.retriable or time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)

    def _record(self, user_id: str, item_id: str, event_type: str, **fields: Any) -> float:
        """Record an interaction; return the seconds from its acknowledgement until the user's state has it."""
        event_id = f"{self._run_id}-{event_type}-{user_id}"
        event = events_pb2.Interaction(event_id=event_id, user_id=user_id, item_id=item_id, type=event_type, **fields)
        recorded = self._call("RecordInteractions", gateway_pb2.RecordInteractionsRequest(interactions=[event]))
        acknowledged = time.monotonic()
        applied = False
        while not applied and time.monotonic() - acknowledged < _WAIT_S:
            request = _recommend(user_id, 1, freshness_token=recorded.receipts[0].token)
            applied = self._call("Recommend", request).token_honoured
        return time.monotonic() - acknowledged

    def _top(self, user_id: str, k: int, *, as_of_s: int | None = None) -> list[str]:
        request = _recommend(user_id, k)
        if as_of_s is not None:
            request.as_of.FromSeconds(as_of_s)
        return [scored.item_id for scored in self._call("Recommend", request).items]

    def _finds(self, readers: Sequence[str], item_id: str, depth: int) -> Iterator[tuple[str, int]]:
        """Yield a reader with the item among the first `depth`, and its rank, until the caller stops or time is up."""
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            for reader in readers:
                top = self._top(reader, depth)
                if item_id in top:
                    yield reader, top.index(item_id) + 1
            time.sleep(_LOOK_AGAIN_S)

    def _explain(self, reader: str, item_id: str) -> gateway_pb2.ExplainResponse | None:
        """Return None if the call fails, for example because the item no longer has a state."""
        try:
            request = gateway_pb2.ExplainRequest(user_id=reader, item_id=item_id, max_pairs=3)
            return self._call("Explain", request)  # type: ignore[no-any-return]
        except FreshetError:
            return None

    def _name(self, item_id: str) -> str:
        return self._titles.get(item_id) or item_id

    def _named(self, item_ids: Sequence[str]) -> str:
        return "; ".join(self._name(one) for one in item_ids[:_SHOWN])


def _recommend(user_id: str, k: int, **fields: Any) -> gateway_pb2.RecommendRequest:
    return gateway_pb2.RecommendRequest(user_id=user_id, k=k, **fields)


def _similarities(answer: gateway_pb2.GatewayServiceSearchResponse) -> dict[str, float]:
    return {one.item_id: found.score for one in answer.results for found in one.found_by if found.source == "mol"}


def _words(title: str) -> list[str]:
    return [word for word in re.findall(r"[^\W\d_]+", title.lower()) if len(word) >= _MIN_LETTERS]
