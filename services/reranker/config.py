"""Settings of the reranker."""

from pydantic import Field

from services.platform.config import ProcessSettings

MEMORY_VARIABLE = "FRESHET_RERANKER_MAX_MEMORY_MB"


class RerankerSettings(ProcessSettings):
    """Each field names its variable."""

    port: int = Field(default=50053, ge=0, le=65535, validation_alias="FRESHET_RERANKER_PORT")
    # Memory limit of items; 0 means what is available on the machine, and then it bounds changes alone.
    max_memory_mb: int = Field(default=0, ge=0, validation_alias=MEMORY_VARIABLE)
    # Folder of snapshots of the stream's changes, which shorten the start.
    snapshots: str = Field(default="", validation_alias="FRESHET_RERANKER_SNAPSHOTS")
