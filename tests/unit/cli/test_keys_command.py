"""`freshet keys`, and how the other commands show a key."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from freshet_client import FreshetError, PermissionDenied, Unauthenticated

from services.cli import client
from services.cli.output import CommandError
from services.gateway.edge.api_keys import digest, read_keys
from services.gateway.edge.roles import Role
from tests.unit.cli.shell import refused, shown


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "api-keys.json"


def test_create_prints_the_secret_once_and_alone(file: Path) -> None:
    options = ("--role", "recommend", "--role", "ingest", "--days", "90", "--rate", "5", "--file", file)
    secret = shown("keys", "create", "shop", *options).strip()
    (key,) = read_keys(file)
    assert key.sha256 == digest(secret.encode()).hex()
    assert (key.id, key.roles, key.requests_per_second) == ("shop", {Role.RECOMMEND, Role.INGEST}, 5)
    assert key.expires is not None
    assert abs(key.expires - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=1)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for text in (shown("keys", "list", "--file", file), shown("keys", "list", "--file", file, "--json")):
        assert "shop" in text
        assert "ingest" in text
        assert secret not in text
        assert key.sha256 not in text


def test_revoke_takes_the_key_out_and_says_when_there_is_none(file: Path) -> None:
    shown("keys", "create", "shop", "--role", "eraser", "--file", file)
    shown("keys", "revoke", "shop", "--file", file)
    assert read_keys(file) == ()
    assert "has no key 'shop'" in refused(1, "keys", "revoke", "shop", "--file", file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "shop"), "--role"),
        (("create", "shop", "--role", "boss"), "boss"),
        (("create", "a b", "--role", "eraser"), "id='a b' allowed: "),
        (("create", "shop", "--role", "eraser", "--rate", "0"), "requests_per_second='0.0' allowed: "),
        (("create", "shop", "--role", "eraser", "--burst", "0"), "burst='0' allowed: "),
        (("list",), "No such file"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name_and_nothing_is_written(
    file: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(2, "keys", *arguments, "--file", file)
    assert not file.exists()


@pytest.mark.parametrize(("process", "is_shown"), [("gateway", True), ("candidates", False)])
def test_the_key_of_the_environment_is_shown_to_the_gateway_alone(
    monkeypatch: pytest.MonkeyPatch, process: str, is_shown: bool
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setenv("FRESHET_API_KEY", "freshet_x")
    client.call(lambda request, **how: sent.append(how), None, target="t", timeout_s=1.0, process=process)
    metadata = (("authorization", "Bearer freshet_x"),)
    assert sent == [{"timeout": 1.0, "metadata": metadata} if is_shown else {"timeout": 1.0}]


@pytest.mark.parametrize("kind", [Unauthenticated, PermissionDenied])
def test_a_refused_key_is_explained_with_what_to_set(kind: type[FreshetError]) -> None:
    error = client.explain(kind("why"))
    assert isinstance(error, CommandError)
    assert error.message == "why"
    assert "FRESHET_API_KEY" in error.advice
