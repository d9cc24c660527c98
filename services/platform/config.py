"""Settings of every process, read once from the environment by `load_settings`.

A process subclasses `ProcessSettings` and names its variables with `Field(validation_alias="FRESHET_<PROCESS>_...")`.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from services.platform.stream.topic import Replicas
from services.platform.transport import KafkaConnection, Tls, TransportSettings


class ConfigError(ValueError):
    """A setting is missing or out of range. The message has the variable, its value and what is allowed."""


class ProcessSettings(TransportSettings):
    """Shared settings. A field's environment variable is its name with the prefix FRESHET_."""

    # False for the gateway and the console, whose clients have no certificates.
    asks_client_certificates: ClassVar[bool] = True

    host: str = "127.0.0.1"
    # Each process sets its own default. Tests use 0, which takes any free port.
    port: int = Field(default=0, ge=0, le=65535)
    # None means port + 1000; 0 disables the metrics endpoint.
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    # Replication factor and min.insync.replicas of created topics. 0: see `Replicas`.
    kafka_replication: int = Field(default=0, ge=0, le=100)
    kafka_min_in_sync: int = Field(default=0, ge=0, le=100)
    bundle: Path = Path(".freshet/bundle")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # "" disables tracing.
    otlp_endpoint: str = ""
    compute_threads: int = Field(default=1, ge=1, le=256)
    # RPCs in flight before new ones are rejected with RESOURCE_EXHAUSTED.
    max_in_flight: int = Field(default=512, ge=1, le=100_000)
    # Maximum age of a gRPC connection, whose running calls may finish; 0 means unlimited. A server that the load
    # balancer removed this long before its end has no connections left then.
    connection_seconds: float = Field(default=0.0, ge=0, le=86_400)
    # Seconds for running calls to finish after SIGTERM.
    drain_seconds: float = Field(default=5.0, ge=0, le=300)

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _metrics_port_fits(self) -> Self:
        if self.metrics_port is None and self.port + 1000 > 65535:
            raise ValueError(f"port={self.port} leaves no room for metrics on port + 1000; set FRESHET_METRICS_PORT")
        return self

    @model_validator(mode="after")
    def _replicas_fit(self) -> Self:
        if 0 < self.kafka_replication < self.kafka_min_in_sync:
            raise ValueError(
                f"FRESHET_KAFKA_MIN_IN_SYNC={self.kafka_min_in_sync} allowed: at most "
                f"FRESHET_KAFKA_REPLICATION={self.kafka_replication}"
            )
        return self

    @property
    def is_on_loopback(self) -> bool:
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def shares_port(self) -> bool:
        return False

    @property
    def replicas(self) -> Replicas:
        return Replicas(replication_factor=self.kafka_replication, min_in_sync=self.kafka_min_in_sync)

    @property
    def resolved_metrics_port(self) -> int:
        if self.metrics_port is not None:
            return self.metrics_port
        return self.port + 1000 if self.port else 0

    def describe(self) -> dict[str, object]:
        """Return the settings for a log line, with masked passwords."""
        fields = self.model_dump(mode="json")
        return {name: _mask(value) if isinstance(value, str) else value for name, value in fields.items()}


def _mask(value: str) -> str:
    if "://" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:  # a password in it could not be located
        return "***"
    if "password=" in parts.query:
        query = [(name, "***" if name == "password" else text) for name, text in parse_qsl(parts.query)]
        parts = parts._replace(query=urlencode(query, safe="*"))
    if parts.password is not None:
        _, _, address = parts.netloc.rpartition("@")
        parts = parts._replace(netloc=f"{parts.username or ''}:***@{address}")
    return urlunsplit(parts)


S = TypeVar("S", bound=TransportSettings)


def load_settings(kind: type[S], **given: Any) -> S:
    """Read `kind` from the environment. given: values that take precedence. Raises: ConfigError."""
    try:
        return kind(**given)
    except ValidationError as exc:
        raise ConfigError(_explain(kind, exc)) from exc


def environment_tls() -> Tls | None:
    """Return the TLS files of a command; None means plaintext. Raises: ConfigError."""
    return load_settings(TransportSettings).tls


def environment_kafka(bootstrap: str) -> KafkaConnection:
    """Return the settings of a command's connection to `bootstrap`. Raises: ConfigError."""
    return load_settings(TransportSettings, kafka_bootstrap=bootstrap).kafka


def _explain(kind: type[TransportSettings], exc: ValidationError) -> str:
    aliases = {field.validation_alias: field for field in kind.model_fields.values()}
    fields = {str(name): field for name, field in (kind.model_fields | aliases).items()}
    lines = []
    for error in exc.errors():
        where = error["loc"]
        if not where:
            lines.append(error["msg"].removeprefix("Value error, "))
            continue
        name = str(where[0])
        field = fields.get(name)
        if field is not None and isinstance(field.validation_alias, str):
            variable = field.validation_alias
        else:
            variable = name if name.upper().startswith("FRESHET_") else f"FRESHET_{name}"
        is_secret = field is not None and field.annotation is SecretStr
        value = "***" if is_secret else _mask(str(error["input"]))
        lines.append(f"{variable.upper()}={value!r} allowed: {error['msg']}")
    return "; ".join(lines)
