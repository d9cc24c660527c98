"""Records of `exposures`: what a reader gets back, and what it is told of one that does not fit."""

from typing import Any

import pytest
from freshet.v1 import events_pb2

from services.contracts.topics.exposures import Exposure, decode_exposure, encode_exposure
from services.platform.errors import InvalidRequest


def exposure(**changes: Any) -> Exposure:
    fields: dict[str, Any] = {
        "exposure_id": "e-1",
        "shown_ms": 1_700_000_000_123,
        "surface": "recommend",
        "model_version": "m1",
        "index_version": "i1",
        "item_ids": ["a", "日本語", "c"],
        "scores": [0.5, 0.25, -1.5],
        "sources": ["mol", "popular", "mol"],
    }
    return Exposure(**fields | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sources": ["mol"] * 3},
        {"propensities": [1.0, 0.5, 0.25]},
        {"context": {"device": "phone", "surface": "日本語"}},
        {"first_position": 21, "text_version": "t1", "surface": "search"},
        {"item_ids": [], "scores": [], "sources": []},
        {"absence_bucket": 17},
        {"assignments": (("one", "control", 0.5), ("two", "", 1.0)), "teams": (0, 1, 1)},
    ],
)
def test_an_exposure_is_read_as_it_was_written(changes: dict[str, Any]) -> None:
    assert decode_exposure(encode_exposure(exposure(**changes))) == exposure(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exposure_id": ""}, "exposure_id="),
        ({"scores": [0.5]}, "scores='1 entries' allowed: as many as item_ids: 3"),
        ({"source": [0, 1]}, "source='2 entries'"),
        ({"source": [0, 1, 7]}, "source=7 allowed: below 2"),
        ({"propensity": []}, "propensity='0 entries'"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], said: str) -> None:
    message = events_pb2.Exposure.FromString(encode_exposure(exposure()))
    for name, value in changes.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidRequest, match=said):
        decode_exposure(message.SerializeToString())
