"""Settings of the generator process."""

from pathlib import Path

from pydantic import Field

from services.platform.config import ProcessSettings


class GeneratorSettings(ProcessSettings):
    """Each field names its variable."""

    port: int = Field(default=50055, ge=0, le=65535, validation_alias="FRESHET_GENERATOR_PORT")
    # Without a text bundle, only titles are searched.
    text: Path = Field(default=Path(".freshet/text"), validation_alias="FRESHET_TEXT")
