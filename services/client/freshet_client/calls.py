"""Build the calls of `Client`'s methods for both clients; send nothing.

A call with many entries becomes as many requests as the limits require.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from freshet.v1 import gateway_pb2

from freshet_client import answers, described
from freshet_client.errors import InvalidArgument, TooLarge
from freshet_client.requests import Filter, HistoryEvent, Impression, Interaction, Item, Rule
from freshet_client.wire import read, write

T = TypeVar("T")

# Limits of one request: the gateway refuses a larger one.
MAX_ENTRIES, MAX_BYTES = 1000, 4 * 1024 * 1024
# Most bytes of an entry's tag and length, and of the request's other fields.
_ENTRY_BYTES, _REST_BYTES = 8, 1024


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call. `field`: the field of the answer to read, "" for the whole answer."""

    method: str
    request: Any
    field: str = ""

    def read(self, answer: Any) -> T:
        """The answer as a plain value."""
        if not self.field:
            return read(answer)  # type: ignore[no-any-return]
        value = getattr(answer, self.field)
        if isinstance(value, int):
            return value  # type: ignore[return-value]
        return read(value) if hasattr(value, "DESCRIPTOR") else [read(one) for one in value]  # type: ignore[return-value]


def _call(method: str, request: Any, field: str = "", **fields: Any) -> Call[Any]:
    unknown = fields.keys() - request.DESCRIPTOR.fields_by_name.keys()
    if unknown:
        raise TypeError(f"{method} takes no {', '.join(sorted(unknown))}")
    return Call(method, write(request, fields), field)


def recommend(user_id: str, k: int, options: Any) -> Call[answers.Recommendation]:
    return _call("Recommend", gateway_pb2.RecommendRequest(), user_id=user_id, k=k, **options)


def search(
    query: str, k: int, user_id: str, wanted: Filter | None, context: Mapping[str, str] | None
) -> Call[answers.SearchAnswer]:
    request = gateway_pb2.GatewayServiceSearchRequest()
    return _call("Search", request, query=query, k=k, user_id=user_id, filter=wanted, context=context)


def similar(
    item_id: str, k: int, user_id: str, wanted: Filter | None, context: Mapping[str, str] | None
) -> Call[answers.SimilarAnswer]:
    request = gateway_pb2.GatewayServiceSimilarRequest()
    return _call("Similar", request, item_id=item_id, k=k, user_id=user_id, filter=wanted, context=context)


def explain(
    user_id: str, item_id: str, history: Sequence[HistoryEvent], max_pairs: int, rules: Sequence[Rule]
) -> Call[answers.Explanation]:
    fields: dict[str, Any] = {"history": history, "max_pairs": max_pairs, "rules": rules}
    return _call("Explain", gateway_pb2.ExplainRequest(), user_id=user_id, item_id=item_id, **fields)


def record(interactions: Sequence[Interaction]) -> Iterator[Call[list[answers.Receipt]]]:
    for part in _parts(gateway_pb2.RecordInteractionsRequest, "interactions", interactions):
        yield Call("RecordInteractions", part, "receipts")


def record_impressions(
    user_id: str, exposure_id: str, impressions: Sequence[Impression]
) -> Iterator[Call[list[answers.Receipt]]]:
    for part in _parts(gateway_pb2.RecordImpressionsRequest, "impressions", impressions):
        part.user_id, part.exposure_id = user_id, exposure_id
        yield Call("RecordImpressions", part, "receipts")


def put_items(items: Sequence[Item], fields: Sequence[str]) -> Iterator[Call[int]]:
    for part in _parts(gateway_pb2.PutItemsRequest, "items", items):
        write(part, {"fields": fields})
        yield Call("PutItems", part, "num_written")


def undo(user_id: str, event_id: str) -> Call[answers.Receipt]:
    return _call("UndoInteraction", gateway_pb2.UndoInteractionRequest(), "receipt", user_id=user_id, event_id=event_id)


def forget_user(user_id: str, preview: bool) -> Call[answers.ForgetReport]:
    return _call("ForgetUser", gateway_pb2.ForgetUserRequest(), user_id=user_id, preview=preview)


def freshness() -> Call[answers.FreshnessReport]:
    return _call("GetFreshness", gateway_pb2.GetFreshnessRequest())


def catalogue(max_categories: int) -> Call[described.CatalogueDescription]:
    request = gateway_pb2.DescribeCatalogueRequest()
    return _call("DescribeCatalogue", request, max_categories=max_categories)


def get_item(item_id: str) -> Call[described.ItemReport]:
    return _call("GetItem", gateway_pb2.GetItemRequest(), item_id=item_id)


def list_items(
    prefix: str, category: str, newest_first: bool, page_size: int, page_token: str
) -> Call[described.ItemPage]:
    fields: dict[str, Any] = {"newest_first": newest_first, "page_size": page_size, "page_token": page_token}
    return _call("ListItems", gateway_pb2.ListItemsRequest(), prefix=prefix, category=category, **fields)


def user(user_id: str, max_events: int, skip_events: int) -> Call[described.UserReport]:
    request = gateway_pb2.GetUserRequest()
    return _call("GetUser", request, user_id=user_id, max_events=max_events, skip_events=skip_events)


def exposures(user_id: str, max_answers: int) -> Call[described.ShownAnswers]:
    return _call("ListExposures", gateway_pb2.ListExposuresRequest(), user_id=user_id, max_answers=max_answers)


def exposure(user_id: str, exposure_id: str) -> Call[described.ShownAnswer]:
    request = gateway_pb2.GetExposureRequest()
    return _call("GetExposure", request, "answer", user_id=user_id, exposure_id=exposure_id)


def health(minutes: int) -> Call[described.HealthReport]:
    return _call("GetHealth", gateway_pb2.GetHealthRequest(), minutes=minutes)


def dead_letters(topic: str, max_letters: int) -> Call[described.DeadLetterList]:
    return _call("ListDeadLetters", gateway_pb2.ListDeadLettersRequest(), topic=topic, max_letters=max_letters)


def replay_dead_letter(topic: str, position: answers.StreamPosition, preview: bool) -> Call[described.ReplayedLetter]:
    request = gateway_pb2.ReplayDeadLetterRequest()
    return _call("ReplayDeadLetter", request, topic=topic, position=position, preview=preview)


def tail() -> Call[described.TailedInteractions]:
    return _call("TailInteractions", gateway_pb2.TailInteractionsRequest())


def version_sets() -> Call[described.VersionSets]:
    return _call("GetVersionSets", gateway_pb2.GetVersionSetsRequest())


def change_version_set(change: str, name: str, share: float, expected_revision: int) -> Call[described.Changed]:
    fields: dict[str, Any] = {"name": name, "share": share, "expected_revision": expected_revision}
    return _call("ChangeVersionSet", gateway_pb2.ChangeVersionSetRequest(), change=change, **fields)


def rules() -> Call[described.StandingRules]:
    return _call("ListRules", gateway_pb2.ListRulesRequest())


def put_rules(wanted: Sequence[Rule], expected_revision: int) -> Call[described.Changed]:
    return _call("PutRules", gateway_pb2.PutRulesRequest(), rules=wanted, expected_revision=expected_revision)


def _parts(request: Any, field: str, entries: Sequence[Any]) -> Iterator[Any]:
    """Yield requests within the limits, with the entries in order. All entries are checked first.

    Raises: InvalidArgument for an entry of a wrong type, TooLarge for one that fits no request.
    """
    if not entries:
        raise InvalidArgument(f"{field}=none allowed: at least 1")
    filled = [write(getattr(request(), field).add(), one, f"{field}[{row}].") for row, one in enumerate(entries)]
    starts, size = [0], _REST_BYTES
    for row, one in enumerate(filled):
        own = one.ByteSize() + _ENTRY_BYTES
        if own + _REST_BYTES > MAX_BYTES:
            raise TooLarge(f"{field}[{row}]={own} bytes allowed: at most {MAX_BYTES - _REST_BYTES}")
        if row - starts[-1] == MAX_ENTRIES or size + own > MAX_BYTES:
            starts, size = [*starts, row], _REST_BYTES
        size += own
    for start, end in zip(starts, [*starts[1:], len(filled)], strict=True):
        yield request(**{field: filled[start:end]})
