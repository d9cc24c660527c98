"""Settings of the encoder process."""

from typing import Literal

from pydantic import Field, SecretStr, field_validator

from services.contracts.pseudonyms import PseudonymSettings
from services.user_state.values import DEFAULT_MAX_SEEN, DEFAULT_TTL_SECONDS

# With at most this many earlier keys, a user's joined pseudonyms fit into an id.
MAX_EARLIER_KEYS = 2
MAX_SEEN = 19_000


class EncoderSettings(PseudonymSettings):
    """Times are milliseconds unless the name says otherwise."""

    port: int = Field(default=50051, ge=0, le=65535, validation_alias="FRESHET_ENCODER_PORT")
    group_id: str = Field(default="freshet-encoder", min_length=1, validation_alias="FRESHET_ENCODER_GROUP")
    # A process that does not renew its leases for this long loses its partitions.
    lease_ms: int = Field(default=1000, ge=200, le=60_000, validation_alias="FRESHET_ENCODER_LEASE_MS")
    max_poll_records: int = Field(default=4096, ge=1, le=100_000, validation_alias="FRESHET_ENCODER_MAX_POLL_RECORDS")
    # ONNX Runtime in this process, or the inference server.
    engine: Literal["in-process", "inference-server"] = Field(
        default="inference-server", validation_alias="FRESHET_ENCODER_ENGINE"
    )
    # Cache of recent users' attention keys and values; a full window of 200 events takes 640 kB in a model of 8 blocks.
    cache_mib: int = Field(default=256, ge=0, le=1_000_000, validation_alias="FRESHET_ENCODER_CACHE_MIB")
    # Minimum time between rounds of writing changed histories. A longer one costs less per event, but restoring a lost
    # user reads more of the log.
    history_every_s: float = Field(default=120.0, ge=0.1, le=3600, validation_alias="FRESHET_ENCODER_HISTORY_EVERY_S")
    # A user is stored for this long after the last event.
    user_ttl_seconds: int = Field(
        default=DEFAULT_TTL_SECONDS, ge=60, validation_alias="FRESHET_ENCODER_USER_TTL_SECONDS"
    )
    # The most seen items of a user. A search excludes them and a request's own history, for which MAX_SEEN leaves room.
    max_seen_items: int = Field(
        default=DEFAULT_MAX_SEEN, ge=1, le=MAX_SEEN, validation_alias="FRESHET_ENCODER_MAX_SEEN_ITEMS"
    )
    # Half-life of an event in items' popularity. Changing it clears the stored popularity.
    popularity_half_life_hours: float = Field(
        default=7 * 24, ge=0.1, le=10 * 365 * 24, validation_alias="FRESHET_ENCODER_POPULARITY_HALF_LIFE_HOURS"
    )
    # Earlier keys, at most two, separated by white space. Forgetting a user covers the pseudonyms of these keys too.
    earlier_pseudonym_keys: SecretStr = Field(default=SecretStr(""), validation_alias="FRESHET_PSEUDONYM_KEYS_BEFORE")

    @field_validator("earlier_pseudonym_keys")
    @classmethod
    def _earlier_keys(cls, value: SecretStr) -> SecretStr:
        keys = value.get_secret_value().split()
        if len(keys) > MAX_EARLIER_KEYS or any(len(key.encode()) > 64 for key in keys):
            raise ValueError(f"must be at most {MAX_EARLIER_KEYS} keys of 1-64 bytes, with white space between")
        return value
