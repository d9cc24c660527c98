"""A gateway in memory, for tests. It opens no port.

    gateway = FakeGateway([Item("661", "James and the Giant Peach", ["Animation"]), Item("1", "Toy Story")])
    with gateway.client() as client:
        client.session("42").record("661", "like")

It has the gateway's limits and errors, tokens, pages, seen and shown items, exposures, undo and forget. An item's score
is one point for each category shared with an item of the history, plus a popularity below one. Rules, diversity,
category limits, conditions and version sets change nothing. One contract suite runs on both gateways.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from freshet.v1 import common_pb2, events_pb2, gateway_pb2

from freshet_client.aio import AsyncClient
from freshet_client.checks import check_id, check_interaction, check_k, check_shown, check_text
from freshet_client.client import Client
from freshet_client.errors import (
    Conflict,
    FreshetError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Unsupported,
)
from freshet_client.requests import Item
from freshet_client.wire import write

_FIELDS, _ONE = ("title", "categories", "available", "withdrawn", "attributes"), "attributes."
_PARTITIONS, _MAX_LISTS, _MAX_ANSWERS = 16, 4, 50


@dataclass
class _Event:
    """A user's event at an `offset`."""

    message: Any
    offset: int
    is_undone: bool = False


@dataclass
class _User:
    events: list[_Event] = field(default_factory=list)
    answers: list[tuple[float, list[str]]] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)


@dataclass
class _List:
    user_id: str
    items: Sequence[Any]
    answer: Any
    is_gone: bool = False


class FakeGateway:
    """`items`: the catalogue, as Items or ids. Thread-safe."""

    def __init__(self, items: Iterable[Item | str]) -> None:
        self._lock = threading.RLock()
        self._items: dict[str, Any] = {}
        self._users: dict[str, _User] = {}
        self._lists: dict[str, _List] = {}
        # By page token: the list's name, and the number of items before the page.
        self._places: dict[str, tuple[str, int]] = {}
        self._exposures: dict[str, str] = {}
        self._failures: list[FreshetError] = []
        self._offsets = [0] * _PARTITIONS
        self._applied: list[float] = [math.inf] * _PARTITIONS
        self._epoch = secrets.token_hex(4)
        self._rules = gateway_pb2.ListRulesResponse()
        self._sets = gateway_pb2.GetVersionSetsResponse(serving="in-memory")
        self._add_set("in-memory")
        for one in items:
            item = write(events_pb2.Item(), one if isinstance(one, Item) else Item(one))
            self._items[item.item_id] = item
        self._trained = frozenset(self._items)

    def client(self) -> Client:
        """A blocking client of this gateway."""
        return Client.over(self)

    def async_client(self) -> AsyncClient:
        """An asyncio client of this gateway."""
        return AsyncClient.over(_AsyncTransport(self))

    def fail(self, *errors: FreshetError) -> None:
        """Let the next calls raise these errors, one each."""
        self._failures += errors

    def hold_back(self) -> None:
        """Acknowledge writes, but apply none: tokens are not honoured until `catch_up`."""
        self._applied = [offset - 1 for offset in self._offsets]

    def catch_up(self) -> None:
        """Apply what was held back."""
        self._applied = [math.inf] * _PARTITIONS

    def end_lists(self) -> None:
        """End all kept lists, as if 15 minutes had passed."""
        for one in self._lists.values():
            one.is_gone = True

    def stage(self, name: str) -> None:
        """Add a version set, ready and warm. All sets answer the same."""
        self._add_set(name)
        self._sets.revision += 1

    def interactions(self, user_id: str) -> list[Any]:
        """A user's interactions without undone ones, oldest first, as messages."""
        return [one.message for one in self._users.get(user_id, _User()).events if not one.is_undone]

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """The method's answer to the request's message."""
        with self._lock:
            if self._failures:
                raise self._failures.pop(0)
            handler = getattr(self, f"_{method}", None)
            if handler is None:
                raise Unsupported(f"the gateway in memory has no {method}")
            answered = handler(request)
            # A copy, so that caller and gateway share no object, as over a network.
            return type(answered).FromString(answered.SerializeToString())

    def stream(self, method: str, request: Any) -> Any:
        """Raises: Unsupported, like every method that this gateway lacks."""
        raise Unsupported(f"the gateway in memory has no {method}")

    def close(self) -> None:
        """There is no connection."""

    def _Recommend(self, request: Any) -> Any:
        check_k(request.k)
        if request.user_id:
            check_id("user_id", request.user_id)
        elif not request.history:
            raise InvalidArgument.of("user_id", "", "1-128 bytes of UTF-8, or empty with a history")
        check_shown(request)
        if request.page_token:
            return self._page(request)
        user = self._users.get(request.user_id)
        applied, is_honoured = self._applied_to(request)
        history = [(one.item_id, one.type) for one in request.history] or [(one.item_id, one.type) for one in applied]
        answer = gateway_pb2.RecommendResponse(
            model_version="in-memory", token_honoured=is_honoured, searched_share=1.0, request_id=secrets.token_hex(8)
        )
        source = "request" if request.history else "stored" if history else "none"
        answer.state_source = source
        if source == "none":
            answer.degradations.append(gateway_pb2.DEGRADATION_POPULAR_FALLBACK)
        else:
            answer.index_version = "in-memory-1"
        exact = common_pb2.Certificate(kind=common_pb2.Certificate.KIND_EXACT, gap=0.0)
        answer.certificate.CopyFrom(exact if history else common_pb2.Certificate(kind="KIND_ESTIMATE"))
        if request.HasField("max_gap"):
            answer.certificate.asked_gap = request.max_gap
            if not history:
                answer.degradations.append(gateway_pb2.DEGRADATION_GAP_NOT_PROVEN)
        if not is_honoured:
            answer.degradations.append(gateway_pb2.DEGRADATION_TOKEN_NOT_HONOURED)
        seen = {item_id for item_id, kind in history if kind != "impression"}
        seen |= {one.item_id for one in applied if one.type != "impression"}
        if request.HasField("filter") and request.filter.HasField("exclude_seen") and not request.filter.exclude_seen:
            seen = set()
        denied = seen | self._recent_items(user, request)
        ranked = self._ranked(history, request, denied)[: max(request.k, request.page_depth)]
        token = ""
        if user is not None and user.events and len(ranked) > request.k and request.page_depth:
            token = self._store_list(request, user, ranked, answer)
        return self._shown(request, answer, ranked[: request.k], token)

    def _applied_to(self, request: Any) -> tuple[list[Any], bool]:
        """The user's applied events, and whether they reach the token."""
        limit = self._applied[_partition(request.user_id)]
        user = self._users.get(request.user_id, _User())
        events = [one.message for one in user.events if one.offset <= limit and not one.is_undone]
        if not request.HasField("freshness_token"):
            return events, True
        token = request.freshness_token
        return events, token.epoch == self._epoch and token.offset <= limit

    def _ranked(self, history: Sequence[tuple[str, str]], request: Any, denied: set[str]) -> list[Any]:
        taken = Counter(
            one.message.item_id for user in self._users.values() for one in user.events if not one.is_undone
        )
        liked = Counter(
            name for item_id, _ in history if item_id in self._items for name in self._items[item_id].categories
        )
        wanted, found = request.filter, []
        for item in self._served():
            is_allowed = not wanted.allow_item_ids or item.item_id in wanted.allow_item_ids
            names = set(item.categories)
            is_allowed &= not wanted.allow_categories or bool(names & set(wanted.allow_categories))
            is_allowed &= not names & set(wanted.deny_categories) and item.item_id not in wanted.deny_item_ids
            if is_allowed and item.item_id not in denied:
                score = sum(liked[name] for name in names) + taken[item.item_id] / (1 + taken[item.item_id])
                source = "mol" if history else "popular"
                found.append(common_pb2.ScoredItem(item_id=item.item_id, score=score, source=source))
        found.sort(key=lambda one: (-one.score, one.item_id))
        return found

    def _served(self) -> list[Any]:
        return [
            one
            for one in self._items.values()
            if not one.withdrawn and (one.available or not one.HasField("available"))
        ]

    def _recent_items(self, user: _User | None, request: Any) -> set[str]:
        if user is None or not request.HasField("not_again"):
            return set()
        asked, since = request.not_again, time.monotonic() - 60 * request.not_again.minutes
        newest = list(enumerate(reversed(user.answers)))
        return {
            item_id
            for number, (at, item_ids) in newest
            if number < asked.answers or (asked.minutes and at >= since)
            for item_id in item_ids
        }

    def _shown(self, request: Any, answer: Any, items: Sequence[Any], token: str) -> Any:
        user = self._users.get(request.user_id)
        if user is not None and user.events and request.HasField("not_again"):
            user.answers = [*user.answers, (time.monotonic(), [one.item_id for one in items])][-_MAX_ANSWERS:]
        answer.items.extend(items)
        answer.next_page_token = token
        if request.with_details:
            for one in answer.items:
                one.title = self._items[one.item_id].title
                one.categories.extend(self._items[one.item_id].categories)
        answer.exposure_id = self._exposure(request.user_id)
        return answer

    def _exposure(self, user_id: str) -> str:
        exposure_id = secrets.token_urlsafe(18)
        self._exposures[exposure_id] = user_id
        return exposure_id

    def _store_list(self, request: Any, user: _User, ranked: Sequence[Any], answer: Any) -> str:
        name, page = secrets.token_hex(5), gateway_pb2.RecommendResponse()
        page.CopyFrom(answer)
        page.state_source = "page"
        self._lists[name] = _List(request.user_id, ranked, page)
        user.lists.append(name)
        for old in user.lists[:-_MAX_LISTS]:
            self._lists[old].is_gone = True
        return self._place(name, request.k)

    def _place(self, name: str, offset: int) -> str:
        token = secrets.token_urlsafe(18)
        self._places[token] = (name, offset)
        return token

    def _page(self, request: Any) -> Any:
        if request.page_token not in self._places:
            shown = f"text of {len(request.page_token)} characters"
            raise InvalidArgument.of("page_token", shown, "next_page_token of an earlier answer, unchanged")
        name, start = self._places[request.page_token]
        stored = self._lists[name]
        if stored.user_id != request.user_id:
            raise PermissionDenied("page_token: of another user's list; allowed: of this one's")
        if stored.is_gone:
            allowed = f"within 15 minutes, of a user's {_MAX_LISTS} newest lists"
            raise PreconditionFailed(f"page_token: its list is gone; allowed: {allowed}")
        rows = [row for row in range(start, len(stored.items)) if not self._items[stored.items[row].item_id].withdrawn]
        rows = rows[: request.k]
        end = rows[-1] + 1 if rows else len(stored.items)
        answer = gateway_pb2.RecommendResponse()
        answer.CopyFrom(stored.answer)
        token = self._place(name, end) if end < len(stored.items) else ""
        return self._shown(request, answer, [stored.items[row] for row in rows], token)

    def _Search(self, request: Any) -> Any:
        check_text("query", request.query, 1, 1024)
        check_k(request.k)
        words = set(request.query.lower().split())
        if not request.user_id and request.filter.exclude_seen:
            raise InvalidArgument.of("filter.exclude_seen", True, "only together with user_id")
        seen = {one.item_id for one in self.interactions(request.user_id)} if request.filter.exclude_seen else set()
        found = [
            gateway_pb2.SearchResult(item_id=one.item_id, title=one.title, score=score)
            for one in self._served()
            if one.item_id not in seen and (score := len(words & set(one.title.lower().split())))
        ]
        found.sort(key=lambda one: (-one.score, one.item_id))
        exposure_id = self._exposure(request.user_id)
        return gateway_pb2.GatewayServiceSearchResponse(results=found[: request.k], exposure_id=exposure_id)

    def _Similar(self, request: Any) -> Any:
        check_id("item_id", request.item_id)
        check_k(request.k)
        if request.item_id not in self._items:
            raise NotFound(f"no index serves item {request.item_id!r}")
        names = set(self._items[request.item_id].categories)
        seen = {one.item_id for one in self.interactions(request.user_id)} | {request.item_id}
        found = [
            gateway_pb2.SimilarItem(item_id=one.item_id, title=one.title, similarity=_overlap(names, one.categories))
            for one in self._served()
            if one.item_id not in seen
        ]
        found.sort(key=lambda one: (-one.similarity, one.item_id))
        exposure_id = self._exposure(request.user_id)
        return gateway_pb2.GatewayServiceSimilarResponse(
            items=found[: request.k], exposure_id=exposure_id, model_version="in-memory"
        )

    def _RecordInteractions(self, request: Any) -> Any:
        if not 1 <= len(request.interactions) <= 1000:
            raise InvalidArgument.of("interactions", f"{len(request.interactions)} interactions", "1-1000")
        for position, one in enumerate(request.interactions):
            prefix = f"interactions[{position}]."
            check_interaction(one, prefix)
            if self._exposures.get(one.exposure_id, one.user_id) != one.user_id:
                message = "exposure_id: of an answer to another user; allowed: of an answer to this one"
                raise PermissionDenied(prefix + message)
        return gateway_pb2.RecordInteractionsResponse(receipts=[self._append(one) for one in request.interactions])

    def _append(self, one: Any) -> Any:
        token = self._next_token(one.user_id)
        user = self._users.setdefault(one.user_id, _User())
        stored = events_pb2.Interaction()
        stored.CopyFrom(one)
        stored.event_id = one.event_id or secrets.token_hex(16)
        if stored.event_id not in {known.message.event_id for known in user.events}:
            user.events.append(_Event(stored, token.offset))
        return gateway_pb2.InteractionReceipt(event_id=stored.event_id, token=token)

    def _next_token(self, user_id: str) -> Any:
        partition = _partition(user_id)
        self._offsets[partition] += 1
        return common_pb2.FreshnessToken(epoch=self._epoch, partition=partition, offset=self._offsets[partition] - 1)

    def _RecordImpressions(self, request: Any) -> Any:
        check_id("user_id", request.user_id)
        if not 1 <= len(request.impressions) <= 1000:
            raise InvalidArgument.of("impressions", f"{len(request.impressions)} impressions", "1-1000")
        if request.exposure_id not in self._exposures:
            shown = f"text of {len(request.exposure_id)} characters"
            raise InvalidArgument.of("exposure_id", shown, "as an answer of this installation gave it")
        if self._exposures[request.exposure_id] != request.user_id:
            raise PermissionDenied("exposure_id: of an answer to another user; allowed: of an answer to this one")
        receipts = [
            self._append(
                events_pb2.Interaction(
                    user_id=request.user_id,
                    item_id=one.item_id,
                    event_id=f"impression-{request.exposure_id}-{one.position}",
                    type="impression",
                    exposure_id=request.exposure_id,
                )
            )
            for one in request.impressions
        ]
        return gateway_pb2.RecordImpressionsResponse(receipts=receipts)

    def _UndoInteraction(self, request: Any) -> Any:
        check_id("user_id", request.user_id)
        check_id("event_id", request.event_id)
        token = self._next_token(request.user_id)
        for one in self._users.get(request.user_id, _User()).events:
            one.is_undone |= one.message.event_id == request.event_id
        receipt = gateway_pb2.InteractionReceipt(event_id=f"undo-{request.event_id}", token=token)
        return gateway_pb2.UndoInteractionResponse(receipt=receipt)

    def _PutItems(self, request: Any) -> Any:
        for position, one in enumerate(request.items):
            check_id(f"items[{position}].item_id", one.item_id)
        for position, name in enumerate(request.fields):
            if name not in _FIELDS and not name.startswith(_ONE):
                raise InvalidArgument.of(f"fields[{position}]", name, ", ".join(_FIELDS))
        for one in request.items:
            if request.fields and one.item_id not in self._items:
                raise NotFound(f"the catalogue has no item {one.item_id!r}; an edit of some fields needs a known one")
        for one in request.items:
            kept = self._items.setdefault(one.item_id, events_pb2.Item())
            _edit(kept, one, request.fields)
        return gateway_pb2.PutItemsResponse(num_written=len(request.items))

    def _GetItem(self, request: Any) -> Any:
        check_id("item_id", request.item_id)
        if request.item_id not in self._items:
            raise NotFound(f"the catalogue has no item {request.item_id!r}")
        return gateway_pb2.GetItemResponse(item=self._described(request.item_id), model_version="in-memory")

    def _ListItems(self, request: Any) -> Any:
        if request.page_size > 1000:
            raise InvalidArgument.of("page_size", request.page_size, "0-1000")
        if request.page_token and not request.page_token.isdecimal():
            raise InvalidArgument.of("page_token", request.page_token, "that of a page of this model")
        prefix, first = request.prefix.lower(), int(request.page_token or 0)
        found = [
            item_id
            for item_id, one in self._items.items()
            if (item_id.lower().startswith(prefix) or one.title.lower().startswith(prefix))
            and (not request.category or request.category in one.categories)
        ]
        found = found[::-1] if request.newest_first else found
        end = first + (request.page_size or 50)
        items = [self._described(item_id) for item_id in found[first:end]]
        return gateway_pb2.ListItemsResponse(items=items, next_page_token=str(end) if end < len(found) else "")

    def _described(self, item_id: str) -> Any:
        described = gateway_pb2.DescribedItem(item=self._items[item_id], is_trained=item_id in self._trained)
        if not described.item.HasField("available"):
            described.item.available = True
        return described

    def _Explain(self, request: Any) -> Any:
        check_id("item_id", request.item_id)
        history = [(one.item_id, one.type) for one in request.history or self.interactions(request.user_id)]
        if not history or request.item_id not in self._items:
            return gateway_pb2.ExplainResponse(model_version="in-memory", state_source="none")
        only = gateway_pb2.RecommendRequest()
        only.filter.allow_item_ids.append(request.item_id)
        (found,) = self._ranked(history, only, set()) or [common_pb2.ScoredItem()]
        answer = gateway_pb2.ExplainResponse(
            score=found.score, share_of_model=1.0, score_with_rules=found.score, model_version="in-memory"
        )
        answer.state_source = "request" if request.history else "stored"
        answer.similarity.score = answer.similarity.from_model = found.score
        answer.votes.model_share = 1.0
        answer.history.extend(gateway_pb2.PastInteraction(item_id=item_id) for item_id, _ in history[:-11:-1])
        return answer

    def _ForgetUser(self, request: Any) -> Any:
        check_id("user_id", request.user_id)
        found = {"history_events": len(self.interactions(request.user_id))}
        if request.preview:
            return gateway_pb2.ForgetUserResponse(found=found, left=found)
        for one in self._lists.values():
            one.is_gone |= one.user_id == request.user_id
        self._users.pop(request.user_id, None)
        left = {"history_events": 0}
        return gateway_pb2.ForgetUserResponse(forget_id=secrets.token_hex(8), found=found, left=left, is_applied=True)

    def _ListRules(self, _: Any) -> Any:
        return self._rules

    def _PutRules(self, request: Any) -> Any:
        if len(request.rules) > 8:
            raise InvalidArgument.of("rules", f"{len(request.rules)} rules", "at most 8")
        revision = _next_revision(request, self._rules)
        self._rules = gateway_pb2.ListRulesResponse(revision=revision, rules=request.rules)
        return gateway_pb2.PutRulesResponse(revision=revision, is_applied=True)

    def _add_set(self, name: str) -> None:
        self._sets.sets.add(set=events_pb2.VersionSet(name=name, model_version=name), ready=True)

    def _GetVersionSets(self, _: Any) -> Any:
        return self._sets

    def _ChangeVersionSet(self, request: Any) -> Any:
        kind, sets, name = gateway_pb2.ChangeVersionSetRequest, self._sets, request.name
        if request.change not in range(1, 6):
            raise InvalidArgument.of("change", request.change, "1-5, see ChangeVersionSetRequest.Change")
        revision = _next_revision(request, sets)
        names = [one.set.name for one in sets.sets]
        if request.change == kind.CHANGE_ROLL_BACK:
            if not sets.HasField("canary") and not sets.before:
                raise PreconditionFailed(f"set {sets.serving!r} has no predecessor to go back to")
            if not sets.HasField("canary"):
                sets.serving, sets.before = sets.before, ""
                sets.ClearField("shadow")
            sets.ClearField("canary")
        elif name not in names:
            raise NotFound(f"set={name!r} allowed: {', '.join(sorted(names))}")
        elif name == sets.serving:
            raise PreconditionFailed(f"set {name!r} serves")
        elif request.change in (kind.CHANGE_SHADOW, kind.CHANGE_CANARY):
            if not 0 <= request.share <= 1:
                raise InvalidArgument.of("share", request.share, "0 to 1 (0 % to 100 %)")
            field = "shadow" if request.change == kind.CHANGE_SHADOW else "canary"
            sets.ClearField(field)
            if request.share:
                getattr(sets, field).CopyFrom(events_pb2.SetShare(name=name, share=request.share))
        elif request.change == kind.CHANGE_PROMOTE:
            sets.serving, sets.before = name, sets.serving
            sets.ClearField("canary")
            sets.ClearField("shadow")
        elif sets.HasField("canary"):
            raise PreconditionFailed(f"set {name!r} answers {sets.canary.share:.3%} of users: end the canary first")
        else:
            del sets.sets[names.index(name)]
            sets.before = "" if sets.before == name else sets.before
            sets.ClearField("shadow")
        sets.revision = revision
        return gateway_pb2.ChangeVersionSetResponse(revision=revision, is_applied=True)

    def _GetFreshness(self, _: Any) -> Any:
        return gateway_pb2.GetFreshnessResponse(
            model_version="in-memory", index_version="in-memory-1", epoch=self._epoch
        )

    def _DescribeCatalogue(self, request: Any) -> Any:
        counts = Counter(name for one in self._items.values() for name in one.categories)
        largest = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[: request.max_categories or 1_000]
        return gateway_pb2.DescribeCatalogueResponse(
            model_version="in-memory",
            items=len(self._items),
            categories=[gateway_pb2.CategoryCount(name=name, items=items) for name, items in largest],
            num_categories=len(counts),
        )

    def _GetUser(self, request: Any) -> Any:
        check_id("user_id", request.user_id)
        events = [one for one in self.interactions(request.user_id) if one.type != "impression"][::-1]
        first, answer = request.skip_events, gateway_pb2.GetUserResponse(model_version="in-memory")
        for one in events[first : first + (request.max_events or 100)]:
            event = answer.events.add(item_id=one.item_id, type=one.type or "interaction", value=one.value)
            event.title = self._items[one.item_id].title if one.item_id in self._items else ""
            event.event_time.CopyFrom(one.event_time)
        answer.num_events, answer.num_seen = len(events), len({one.item_id for one in events})
        return answer


class _AsyncTransport:
    def __init__(self, gateway: FakeGateway) -> None:
        self._gateway = gateway

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        return self._gateway.call(method, request, timeout_s)

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        for message in self._gateway.stream(method, request):
            yield message

    async def close(self) -> None:
        """There is no connection."""


def _next_revision(request: Any, found: Any) -> int:
    if request.expected_revision != found.revision:
        raise Conflict(f"expected_revision={request.expected_revision} allowed: {found.revision}, the present one")
    return int(found.revision) + 1


def _edit(kept: Any, edit: Any, fields: Sequence[str]) -> None:
    if not fields:
        kept.CopyFrom(edit)
    for name in fields:
        if name.startswith(_ONE):
            name = name[len(_ONE) :]
            kept.attributes.pop(name, None)
            if name in edit.attributes:
                kept.attributes[name].CopyFrom(edit.attributes[name])
        else:
            kept.ClearField(name)
            only = events_pb2.Item()
            only.CopyFrom(edit)
            for other in _FIELDS:
                if other != name:
                    only.ClearField(other)
            kept.MergeFrom(only)


def _partition(user_id: str) -> int:
    return zlib.crc32(user_id.encode()) % _PARTITIONS


def _overlap(names: set[str], others: Iterable[str]) -> float:
    union = names | set(others)
    return len(names & set(others)) / len(union) if union else 0.0
