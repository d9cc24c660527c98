"""The encoder's bounds fit the others': what it keeps, a search must be able to leave out."""

import pytest

from services.algorithms.filters import MAX_IDS
from services.common.config import ConfigError, load_settings
from services.encoder.config import MAX_SEEN, EncoderSettings
from services.gateway.validation import MAX_HISTORY


def test_seen_items_and_a_requests_history_fit_into_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SEEN + MAX_HISTORY <= MAX_IDS
    monkeypatch.setenv("FRESHET_ENCODER_MAX_SEEN_ITEMS", str(MAX_SEEN + 1))
    with pytest.raises(ConfigError, match=r"FRESHET_ENCODER_MAX_SEEN_ITEMS='19001' allowed: .* 19000"):
        load_settings(EncoderSettings)
