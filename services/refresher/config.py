"""The refresher process's settings: the shared ones, how feedback counts, what is remembered, how often it writes."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from services.algorithms.pefa.policy import DEFAULT_SHARE, SharePolicy
from services.platform.config import ProcessSettings


class RefresherSettings(ProcessSettings):
    """Variables are named per field; times are milliseconds unless the name says otherwise."""

    port: int = Field(default=50054, ge=0, le=65535, validation_alias="FRESHET_REFRESHER_PORT")
    # Read where the topic has no checkpoint: what `freshet restore` put there.
    checkpoints: Path = Field(default=Path(".freshet/data/refresher"), validation_alias="FRESHET_REFRESHER_CHECKPOINTS")
    # How far an item may leave its model (lambda); applied when publishing.
    model_weight: str = Field(default=DEFAULT_SHARE.text, validation_alias="FRESHET_REFRESHER_SHARE")
    # How far a new item may go; empty: as long as the bundle says of its model (of a bundle that does not say, each
    # partition asks its known items' sums).
    new_item_model_weight: str = Field(default="", validation_alias="FRESHET_REFRESHER_NEW_ITEM_SHARE")
    # An item that only interactions speak for is published once so many users stand behind it.
    min_users: int = Field(default=3, ge=1, le=1000, validation_alias="FRESHET_REFRESHER_MIN_USERS")
    # Remembered interactions (PEFA-XL), per partition of `attributions`.
    max_remembered: int = Field(default=4096, ge=1, le=10_000_000, validation_alias="FRESHET_REFRESHER_MAX_REMEMBERED")
    # Makes states of new items from their titles and categories, until enough users stand behind them; empty: none.
    text_encoder: Literal["", "minilm"] = Field(default="", validation_alias="FRESHET_REFRESHER_TEXT_ENCODER")
    # Changes are gathered this long before they are published.
    publish_ms: int = Field(default=200, ge=10, le=60_000, validation_alias="FRESHET_REFRESHER_PUBLISH_MS")
    checkpoint_seconds: float = Field(
        default=30.0, ge=0.1, le=3600, validation_alias="FRESHET_REFRESHER_CHECKPOINT_SECONDS"
    )
    # A refresher that is not heard of for so long has lost its partitions to the others.
    lease_ms: int = Field(default=1000, ge=200, le=60_000, validation_alias="FRESHET_REFRESHER_LEASE_MS")

    @field_validator("model_weight")
    @classmethod
    def _model_weight(cls, value: str) -> str:
        return SharePolicy.parse(value).text

    @field_validator("new_item_model_weight")
    @classmethod
    def _new_item_model_weight(cls, value: str) -> str:
        return SharePolicy.parse(value).text if value else value
