"""Settings of the refresher process."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from services.algorithms.pefa.policy import DEFAULT_SHARE, SharePolicy
from services.platform.config import ProcessSettings


class RefresherSettings(ProcessSettings):
    """Times are milliseconds unless the name says otherwise."""

    port: int = Field(default=50054, ge=0, le=65535, validation_alias="FRESHET_REFRESHER_PORT")
    # Folder that `freshet restore` writes, read if the topic has no checkpoint.
    checkpoints: Path = Field(default=Path(".freshet/data/refresher"), validation_alias="FRESHET_REFRESHER_CHECKPOINTS")
    # Model weight (lambda) of known items, applied when publishing.
    model_weight: str = Field(default=DEFAULT_SHARE.text, validation_alias="FRESHET_REFRESHER_SHARE")
    # Model weight of new items. "" uses the bundle's, or if it has none, the sums of each partition's known items.
    new_item_model_weight: str = Field(default="", validation_alias="FRESHET_REFRESHER_NEW_ITEM_SHARE")
    # A new item is published from this many distinct users on.
    min_users: int = Field(default=3, ge=1, le=1000, validation_alias="FRESHET_REFRESHER_MIN_USERS")
    # Remembered interactions (PEFA-XL), per partition of `attributions`.
    max_remembered: int = Field(default=4096, ge=1, le=10_000_000, validation_alias="FRESHET_REFRESHER_MAX_REMEMBERED")
    # Encodes titles and categories of new items until the items have enough users. "" turns this off.
    text_encoder: Literal["", "minilm"] = Field(default="", validation_alias="FRESHET_REFRESHER_TEXT_ENCODER")
    # Time between two publications.
    publish_ms: int = Field(default=200, ge=10, le=60_000, validation_alias="FRESHET_REFRESHER_PUBLISH_MS")
    checkpoint_seconds: float = Field(
        default=30.0, ge=0.1, le=3600, validation_alias="FRESHET_REFRESHER_CHECKPOINT_SECONDS"
    )
    # A refresher that does not renew its leases for this long loses its partitions.
    lease_ms: int = Field(default=1000, ge=200, le=60_000, validation_alias="FRESHET_REFRESHER_LEASE_MS")

    @field_validator("model_weight")
    @classmethod
    def _model_weight(cls, value: str) -> str:
        return SharePolicy.parse(value).text

    @field_validator("new_item_model_weight")
    @classmethod
    def _new_item_model_weight(cls, value: str) -> str:
        return SharePolicy.parse(value).text if value else value
