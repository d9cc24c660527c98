"""The gateway's settings: where the refreshers are."""

import pytest

from services.common.config import ConfigError, load_settings
from services.gateway.config import GatewaySettings


def test_several_refreshers_are_named_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_REFRESHER_ADDRESSES", "one:50054, two:50054")
    assert load_settings(GatewaySettings).refreshers == ("one:50054", "two:50054")


def test_a_refresher_without_a_port_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_REFRESHER_ADDRESSES", "one:50054,two")
    with pytest.raises(ConfigError, match=r"FRESHET_REFRESHER_ADDRESSES='one:50054,two' allowed: .*host:port"):
        load_settings(GatewaySettings)
