"""Settings of the generator process: shared ones, the text bundle, weights of clicks."""

from pathlib import Path

from pydantic import Field, field_validator

from services.algorithms.pefa.policy import SharePolicy
from services.platform.config import ProcessSettings


class GeneratorSettings(ProcessSettings):
    """Each field names its variable."""

    port: int = Field(default=50055, ge=0, le=65535, validation_alias="FRESHET_GENERATOR_PORT")
    # Without a text bundle, words are searched only in the catalogue's titles.
    text: Path = Field(default=Path(".freshet/text"), validation_alias="FRESHET_TEXT")

    # How far clicks move an item of the text model (lambda of PEFA-XS), and an item unknown to it.
    click_share: str = Field(default="paper", validation_alias="FRESHET_GENERATOR_CLICK_SHARE")
    new_item_share: str = Field(default="new_item", validation_alias="FRESHET_GENERATOR_NEW_ITEM_SHARE")
    # Remembered queries that vote for a query (k of PEFA-XL), and lambda of the votes: the model's share of a final
    # score.
    # Chosen on MedQuAD's held-out queries (docs/benchmarks/pefa.md).
    vote_neighbours: int = Field(default=8, ge=1, le=10_000, validation_alias="FRESHET_GENERATOR_VOTE_NEIGHBOURS")
    vote_model_share: float = Field(default=0.7, ge=0, le=1, validation_alias="FRESHET_GENERATOR_VOTE_MODEL_SHARE")
    max_remembered: int = Field(
        default=65_536, ge=1, le=10_000_000, validation_alias="FRESHET_GENERATOR_MAX_REMEMBERED"
    )

    @field_validator("click_share", "new_item_share")
    @classmethod
    def _share(cls, value: str) -> str:
        return SharePolicy.parse(value).text
