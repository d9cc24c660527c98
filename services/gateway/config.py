"""The gateway's settings."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from services.contracts.processes import HTTP_STEP
from services.contracts.pseudonyms import PseudonymSettings, check_key
from services.contracts.shards import MAX_SHARDS
from services.gateway.stages import Limits, Preferences
from services.platform.http.origins import origins
from services.platform.transport import check_address, check_replicas


def shard_addresses(value: str) -> list[str]:
    """Return the addresses of a catalogue's shards, in order. Raises: ValueError."""
    found: list[str] = []
    for number, part in enumerate(value.split(";")):
        if not part.strip():
            raise ValueError(f"shard {number} has no address")
        found.append(check_replicas(part.strip()))
        taken = set(found[-1].split(","))
        for other, before in enumerate(found[:-1]):
            if taken & set(before.split(",")):
                raise ValueError(f"shards {other} and {number} have an address in common")
    if len(found) > MAX_SHARDS:
        raise ValueError(f"{len(found)} shards; allowed: 1-{MAX_SHARDS}")
    return found


class GatewaySettings(PseudonymSettings):
    """A field's alias is its environment variable."""

    asks_client_certificates: ClassVar[bool] = False

    port: int = Field(default=50050, ge=0, le=65535, validation_alias="FRESHET_GATEWAY_PORT")
    # Port of JSON over HTTP: None means `port` + 30, and 0 disables it.
    http_port: int | None = Field(default=None, ge=0, le=65535, validation_alias="FRESHET_GATEWAY_HTTP_PORT")
    # Allowed origins of browser pages, exact, separated by commas.
    origins: str = Field(default="", validation_alias="FRESHET_GATEWAY_ORIGINS")
    # An address is one host:port for all replicas, or each replica's ip:port, separated by commas.
    encoder_address: str = Field(default="127.0.0.1:50051", validation_alias="FRESHET_ENCODER_ADDRESS")
    # The shards of a catalogue have their addresses here in order, separated by semicolons.
    candidates_address: str = Field(default="127.0.0.1:50052", validation_alias="FRESHET_CANDIDATES_ADDRESS")
    reranker_address: str = Field(default="127.0.0.1:50053", validation_alias="FRESHET_RERANKER_ADDRESS")
    generator_address: str = Field(default="127.0.0.1:50055", validation_alias="FRESHET_GENERATOR_ADDRESS")
    # Addresses of all refreshers, separated by commas. Each refresher reads some partitions.
    refresher_addresses: str = Field(default="127.0.0.1:50054", validation_alias="FRESHET_REFRESHER_ADDRESSES")
    # Time limit of a call without a deadline.
    budget_ms: int = Field(default=2000, ge=10, le=60_000, validation_alias="FRESHET_GATEWAY_BUDGET_MS")
    # Time for one read of the state store, and for one call of another process.
    state_timeout_ms: int = Field(default=250, ge=1, le=60_000, validation_alias="FRESHET_GATEWAY_STATE_TIMEOUT_MS")
    stage_timeout_ms: int = Field(default=400, ge=1, le=60_000, validation_alias="FRESHET_GATEWAY_STAGE_TIMEOUT_MS")
    # How much an impression lowers its item's score, and the half-life of this discount.
    impression_discount: float = Field(
        default=0, ge=0, le=1_000, validation_alias="FRESHET_GATEWAY_IMPRESSION_DISCOUNT"
    )
    impression_half_life_minutes: float = Field(
        default=24 * 60, gt=0, le=30 * 24 * 60, validation_alias="FRESHET_GATEWAY_IMPRESSION_HALF_LIFE_MINUTES"
    )
    # A YAML file (docs/guide/rules.md) with the standing rules that apply until the first PutRules.
    rules: Path | None = Field(default=None, validation_alias="FRESHET_GATEWAY_RULES")
    # Popular items get a higher score for users with fewer items than this.
    cold_items: int = Field(default=10, ge=0, le=1_000, validation_alias="FRESHET_GATEWAY_COLD_ITEMS")
    # The share of positions for new items, and how long an item is new.
    new_item_share: float = Field(default=0, ge=0, le=0.5, validation_alias="FRESHET_GATEWAY_NEW_ITEM_SHARE")
    new_item_hours: float = Field(default=24, gt=0, le=30 * 24, validation_alias="FRESHET_GATEWAY_NEW_ITEM_HOURS")
    # Whether answers are written to `exposures`.
    exposures: bool = Field(default=True, validation_alias="FRESHET_GATEWAY_EXPOSURES")
    # Key that signs texts that clients send back, such as page tokens. All gateways need the same one. If empty, it
    # is read from `signing_key_file`; without a file it is random.
    signing_key: SecretStr = Field(default=SecretStr(""), validation_alias="FRESHET_GATEWAY_SIGNING_KEY")
    signing_key_file: Path | None = Field(default=None, validation_alias="FRESHET_GATEWAY_SIGNING_KEY_FILE")
    # File of the callers' keys (`freshet keys`). None: everyone may call everything, but only on loopback.
    api_keys: Path | None = Field(default=None, validation_alias="FRESHET_API_KEYS")
    # None: the audit log goes to stderr.
    audit_log: Path | None = Field(default=None, validation_alias="FRESHET_AUDIT_LOG")

    @field_validator("generator_address")
    @classmethod
    def _peer(cls, value: str) -> str:
        return check_address(value)

    @field_validator("encoder_address", "reranker_address")
    @classmethod
    def _replicas(cls, value: str) -> str:
        return check_replicas(value)

    @field_validator("origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        return ",".join(sorted(origins(value)))

    @field_validator("candidates_address")
    @classmethod
    def _shards(cls, value: str) -> str:
        return ";".join(shard_addresses(value))

    @field_validator("signing_key")
    @classmethod
    def _signing_key(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            check_key(value.get_secret_value())
        return value

    @field_validator("refresher_addresses")
    @classmethod
    def _peers(cls, value: str) -> str:
        return ",".join(check_address(part.strip()) for part in value.split(",") if part.strip())

    @model_validator(mode="after")
    def _keys_outside_loopback(self) -> Self:
        if self.api_keys is None and not self.is_on_loopback:
            raise ValueError(
                f"FRESHET_API_KEYS='' allowed beside FRESHET_HOST={self.host!r}: a keys file (`freshet keys create`); "
                "without keys, only a loopback address"
            )
        if self.api_keys is None and self.audit_log is not None:
            raise ValueError(f"FRESHET_AUDIT_LOG='{self.audit_log}' allowed: beside FRESHET_API_KEYS; without, empty")
        return self

    @model_validator(mode="after")
    def _names_with_tls(self) -> Self:
        for name in ("encoder_address", "candidates_address", "reranker_address"):
            if self.tls is not None and "," in (value := getattr(self, name)):
                raise ValueError(
                    f"FRESHET_{name.upper()}={value!r} allowed with TLS: one name for all replicas, as in certificates"
                )
        return self

    @property
    def resolved_http_port(self) -> int:
        """Return the port of JSON over HTTP; 0: disabled."""
        if self.http_port is not None:
            return self.http_port
        return self.port + HTTP_STEP if self.port else 0

    @property
    def refreshers(self) -> tuple[str, ...]:
        return tuple(self.refresher_addresses.split(",")) if self.refresher_addresses else ()

    @property
    def limits(self) -> Limits:
        return Limits(
            budget_s=self.budget_ms / 1000,
            state_timeout_s=self.state_timeout_ms / 1000,
            stage_timeout_s=self.stage_timeout_ms / 1000,
        )

    @property
    def preferences(self) -> Preferences:
        return Preferences(
            impression_discount=self.impression_discount,
            impression_half_life_s=self.impression_half_life_minutes * 60,
            cold_items=self.cold_items,
            new_item_share=self.new_item_share,
            new_item_age_s=self.new_item_hours * 3600,
        )
