"""The gateway's settings: where the refreshers are, and whose time-outs they are."""

from pathlib import Path
from typing import Any

import pytest
from fakes.certificates import made, of, settings_of

from services.gateway.config import GatewaySettings, shard_addresses
from services.platform.config import ConfigError, load_settings


def test_several_refreshers_are_named_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_REFRESHER_ADDRESSES", "one:50054, two:50054")
    assert load_settings(GatewaySettings).refreshers == ("one:50054", "two:50054")


def test_search_and_recommend_have_the_same_time_outs_as_the_operator_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_GATEWAY_BUDGET_MS", "7000")
    monkeypatch.setenv("FRESHET_GATEWAY_STATE_TIMEOUT_MS", "600")
    monkeypatch.setenv("FRESHET_GATEWAY_STAGE_TIMEOUT_MS", "900")
    settings = load_settings(GatewaySettings)
    limits = settings.limits
    assert (limits.budget_s, limits.state_timeout_s, limits.stage_timeout_s) == (7.0, 0.6, 0.9)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway.example", ""])
def test_outside_loopback_it_does_not_start_without_a_keys_file(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    with pytest.raises(ValueError, match=rf"FRESHET_API_KEYS='' allowed beside FRESHET_HOST='{host}': a keys file"):
        GatewaySettings(host=host)
    monkeypatch.setenv("FRESHET_HOST", host or "0.0.0.0")
    monkeypatch.setenv("FRESHET_API_KEYS", "keys.json")
    assert load_settings(GatewaySettings).api_keys == Path("keys.json")


def test_an_audit_log_without_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_AUDIT_LOG", "audit.log")
    with pytest.raises(ConfigError, match=r"FRESHET_AUDIT_LOG='audit\.log' allowed: beside FRESHET_API_KEYS"):
        load_settings(GatewaySettings)


def test_shards_and_replicas_are_named_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_CANDIDATES_ADDRESS", "127.0.0.1:1, 127.0.0.1:2; candidates-1:50052;[::1]:3")
    settings = load_settings(GatewaySettings)
    assert shard_addresses(settings.candidates_address) == [
        "127.0.0.1:1,127.0.0.1:2",
        "candidates-1:50052",
        "[::1]:3",
    ]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("one:1;;three:3", "shard 1 has no address"),
        ("one:1;two:2;", "shard 2 has no address"),
        ("one:1;two:2;one:1", "shards 0 and 2 have an address in common"),
        ("127.0.0.1:1,127.0.0.1:2;127.0.0.1:2", "shards 0 and 1 have an address in common"),
        ("127.0.0.1:1,127.0.0.1:1", "names an address twice"),
        ("one:1,two:2", "'one' does not appear to be an IPv4 or IPv6 address"),
        ("one", "host:port"),
        (";".join(f"127.0.0.1:{port}" for port in range(1, 258)), "257 shards; allowed: 1-256"),
    ],
)
def test_a_shard_map_with_a_hole_or_an_overlap_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, says: str
) -> None:
    monkeypatch.setenv("FRESHET_CANDIDATES_ADDRESS", value)
    with pytest.raises(ConfigError, match=f"FRESHET_CANDIDATES_ADDRESS=.*{says}"):
        load_settings(GatewaySettings)


def test_with_tls_replicas_have_one_name(tmp_path: Path) -> None:
    tls: dict[str, Any] = settings_of(of(made(tmp_path), "gateway"))
    assert GatewaySettings(**tls, candidates_address="one:1;two:2").tls is not None
    with pytest.raises(ValueError, match=r"FRESHET_CANDIDATES_ADDRESS=.* allowed with TLS: one name"):
        GatewaySettings(**tls, candidates_address="127.0.0.1:1,127.0.0.1:2")
