"""Settings come from FRESHET_ variables; a bad one is named with its value and what is allowed."""

import importlib
import io
import json
import logging
import re
from pathlib import Path

import pytest
import structlog
from pydantic import Field, SecretStr

from services.contracts.processes import PROCESSES
from services.platform.config import ConfigError, ProcessSettings, load_settings
from services.platform.errors import PreconditionFailed
from services.platform.process import configure_logging, run_process


class DemoSettings(ProcessSettings):
    port: int = Field(default=50999, validation_alias="FRESHET_DEMO_PORT", ge=1, le=65535)


# Of every process.
SETTINGS = [
    kind
    for process in PROCESSES
    for kind in vars(importlib.import_module(f"services.{process}.config")).values()
    if isinstance(kind, type) and issubclass(kind, ProcessSettings) and kind is not ProcessSettings
]


def test_defaults_stand_without_any_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRESHET_BUNDLE", raising=False)
    settings = load_settings(DemoSettings)
    assert (settings.port, settings.resolved_metrics_port) == (50999, 51999)
    assert str(settings.bundle) == ".freshet/bundle"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FRESHET_DEMO_PORT", "99999"),
        ("FRESHET_DEMO_PORT", "abc"),
        ("FRESHET_KAFKA_BOOTSTRAP", "nowhere"),
        ("FRESHET_REDIS_URL", "http://x"),
        ("FRESHET_LOG_LEVEL", "loud"),
        ("FRESHET_COMPUTE_THREADS", "0"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable}='{value}' allowed: "):
        load_settings(DemoSettings)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@127.0.0.1:1/0", "redis://:***@127.0.0.1:1/0"),
        ("redis://127.0.0.1:1/0?password=hunter2&protocol=3", "redis://127.0.0.1:1/0?password=***&protocol=3"),
        ("rediss://me:hunter2@a/0?password=hunter2", "rediss://me:***@a/0?password=***"),
    ],
)
def test_no_form_of_a_password_shows_in_the_described_settings(url: str, shown: str) -> None:
    assert DemoSettings(redis_url=url).describe()["redis_url"] == shown


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda kind: kind.__name__)
def test_no_processs_described_settings_hold_a_secret(
    settings: type[ProcessSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRESHET_REDIS_URL", "redis://me:hunter2@127.0.0.1:16379/0")
    monkeypatch.setenv("FRESHET_PSEUDONYM_KEY", "hunter2")
    monkeypatch.setenv("FRESHET_PSEUDONYM_KEYS_BEFORE", "hunter2")
    monkeypatch.setenv("FRESHET_API_KEY", "hunter2")
    loaded = load_settings(settings)
    assert "hunter2" not in str(loaded.describe())
    # What looks like a secret by its name is masked by its type, or is a path.
    for name, field in settings.model_fields.items():
        if re.search(r"key|secret|password|token", name):
            assert field.annotation in (SecretStr, Path | None), name


def test_a_bad_setting_ends_the_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FRESHET_DEMO_PORT", "0")

    async def never(_: DemoSettings) -> None:
        raise AssertionError("must not start")

    assert run_process("demo", DemoSettings, never) == 1
    assert capsys.readouterr().err.startswith("freshet demo: FRESHET_DEMO_PORT='0' allowed: ")


def test_logs_are_json_lines_for_us_and_for_libraries() -> None:
    before, handlers = structlog.get_config(), list(logging.getLogger().handlers)
    out = io.StringIO()
    try:
        configure_logging("demo", "info", stream=out)
        structlog.get_logger().info("hello", count=3)
        structlog.get_logger().debug("hidden")
        logging.getLogger("some.library").warning("broken %s", "pipe")
    finally:
        structlog.configure(**before)
        logging.getLogger().handlers[:] = handlers
    ours, theirs = (json.loads(line) for line in out.getvalue().splitlines())
    assert (ours["event"], ours["count"], ours["level"], ours["process"]) == ("hello", 3, "info", "demo")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("broken pipe", "some.library", "warning")


@pytest.mark.parametrize(
    ("environment", "brokers", "replicas"),
    [
        ({}, 1, (1, 1)),
        ({}, 2, (1, 1)),
        ({}, 3, (3, 2)),
        ({}, 5, (3, 2)),
        ({"FRESHET_KAFKA_REPLICATION": "2"}, 3, (2, 1)),
        ({"FRESHET_KAFKA_REPLICATION": "5", "FRESHET_KAFKA_MIN_IN_SYNC": "3"}, 5, (5, 3)),
    ],
)
def test_replicas_are_those_of_the_settings_or_what_the_cluster_allows(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], brokers: int, replicas: tuple[int, int]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load_settings(ProcessSettings).replicas.on(brokers) == replicas


def test_an_in_sync_minimum_above_the_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_KAFKA_MIN_IN_SYNC", "2")
    with pytest.raises(PreconditionFailed, match="2 is more than the 1 replicas"):
        load_settings(ProcessSettings).replicas.on(1)
    monkeypatch.setenv("FRESHET_KAFKA_REPLICATION", "1")
    with pytest.raises(ConfigError, match="FRESHET_KAFKA_MIN_IN_SYNC=2"):
        load_settings(ProcessSettings)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FRESHET_REDIS_URL", "rediss://u:secret@[::1"),
        ("FRESHET_REDIS_URL", "redis://u:secret@h:99999/0"),
        ("FRESHET_OTLP_ENDPOINT", "http://u:secret@["),
    ],
)
def test_a_url_that_is_none_ends_in_a_refusal_or_hidden_and_never_shows_its_password(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    try:
        said = str(load_settings(DemoSettings).describe())
    except ConfigError as exc:
        said = str(exc)
        assert variable in said
    assert "secret" not in said
    assert variable == "FRESHET_OTLP_ENDPOINT" or "must be a URL" in said
