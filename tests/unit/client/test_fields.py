"""The client knows all that the protos say: a field that is added there is added here, or left out by name."""

from dataclasses import fields

import pytest
from freshet.v1 import common_pb2, events_pb2, gateway_pb2
from freshet_client import Certificate, Filter, Interaction, Item, Provenance, RecommendOptions, Rule, requests
from freshet_client.wire import _class_of, read

# Of Interaction: what `undo` writes. Of ExplainResponse's parts: of one request, and of a shard.
LEFT_OUT = {"Interaction": {"undoes_event_id"}, "ExplainScoreResponse": {"rules"}, "ExplainVotesResponse": {"shard"}}


def names(cls: type) -> set[str]:
    return {one.name for one in fields(cls)}


def messages(*roots) -> dict[str, object]:
    """Those below the roots, by name."""
    found: dict[str, object] = {}
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if one.name not in found and not one.full_name.startswith("google.") and not one.GetOptions().map_entry:
            found[one.name] = one
            waiting += [field.message_type for field in one.fields if field.message_type is not None]
    return found


ANSWERS = messages(
    gateway_pb2.RecommendResponse.DESCRIPTOR,
    gateway_pb2.GatewayServiceSearchResponse.DESCRIPTOR,
    gateway_pb2.GatewayServiceSimilarResponse.DESCRIPTOR,
    gateway_pb2.ExplainResponse.DESCRIPTOR,
    gateway_pb2.ForgetUserResponse.DESCRIPTOR,
    gateway_pb2.GetFreshnessResponse.DESCRIPTOR,
    gateway_pb2.DescribeCatalogueResponse.DESCRIPTOR,
    gateway_pb2.GetItemResponse.DESCRIPTOR,
    gateway_pb2.ListItemsResponse.DESCRIPTOR,
    gateway_pb2.GetUserResponse.DESCRIPTOR,
    gateway_pb2.ListExposuresResponse.DESCRIPTOR,
    gateway_pb2.GetHealthResponse.DESCRIPTOR,
    gateway_pb2.TailInteractionsResponse.DESCRIPTOR,
    gateway_pb2.ListDeadLettersResponse.DESCRIPTOR,
    gateway_pb2.ReplayDeadLetterResponse.DESCRIPTOR,
    gateway_pb2.ChangeVersionSetResponse.DESCRIPTOR,
    gateway_pb2.GetVersionSetsResponse.DESCRIPTOR,
    gateway_pb2.ListRulesResponse.DESCRIPTOR,
    gateway_pb2.PutRulesResponse.DESCRIPTOR,
    gateway_pb2.InteractionReceipt.DESCRIPTOR,
)
# Spoken between processes alone.
ANSWERS.pop("Shard", None)
# Read as a plain value.
ANSWERS.pop("AttributeValue", None)


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_an_answer_has_every_field_of_its_message(name: str) -> None:
    cls = _class_of(name)
    known = names(cls) | (names(Provenance) if "provenance" in names(cls) else set()) | LEFT_OUT.get(name, set())
    assert set(ANSWERS[name].fields_by_name) - known == set()


def test_a_message_without_a_class_is_named() -> None:
    with pytest.raises(TypeError, match="no class for the message QueryState"):
        read(common_pb2.QueryState())


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Interaction, events_pb2.Interaction),
        (Item, events_pb2.Item),
        (Filter, common_pb2.Filter),
        (Rule, common_pb2.Rule),
        (Certificate, common_pb2.Certificate),
        (requests.Condition, common_pb2.AttributeCondition),
        (requests.HistoryEvent, gateway_pb2.HistoryEvent),
        (requests.NotAgain, gateway_pb2.NotAgain),
    ],
)
def test_a_request_can_say_every_field_of_its_message(cls: type, message) -> None:
    assert names(cls) | LEFT_OUT.get(cls.__name__, set()) == set(message.DESCRIPTOR.fields_by_name)


def test_recommend_takes_every_field_of_its_message() -> None:
    told = {"user_id", "k", *RecommendOptions.__annotations__}
    assert told == set(gateway_pb2.RecommendRequest.DESCRIPTOR.fields_by_name)
