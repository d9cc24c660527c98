"""Where records lie: the newest place of each key, in any order of coming, in few bytes."""

import random

import pytest

from services.user_state import history_topic
from services.user_state.history_topic import HistoryIndex


def test_the_newest_place_of_each_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_topic, "_FEW", 50)
    rng, index, newest = random.Random(1), HistoryIndex(), dict[bytes, int]()
    for _ in range(5_000):
        key, offset = b"user-%d" % rng.randrange(700), rng.randrange(2**40)
        index.put(key, len(key) % 8, offset)
        newest[key] = max(offset, newest.get(key, -1))
    assert {key: index.get(key) for key in newest} == {key: (len(key) % 8, offset) for key, offset in newest.items()}
    assert index.get(b"nobody") is None
