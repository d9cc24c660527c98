"""The reranker's settings: the shared ones, memory, and snapshots."""

from pydantic import Field

from services.platform.config import ProcessSettings

MEMORY_VARIABLE = "FRESHET_RERANKER_MAX_MEMORY_MB"


class RerankerSettings(ProcessSettings):
    """Variables are named per field."""

    port: int = Field(default=50053, ge=0, le=65535, validation_alias="FRESHET_RERANKER_PORT")
    # What the items may take; 0 is whatever the machine has left.
    max_memory_mb: int = Field(default=0, ge=0, validation_alias=MEMORY_VARIABLE)
    # Where snapshots of what the stream changed are kept, for a start that does not read all of it; empty: none.
    snapshots: str = Field(default="", validation_alias="FRESHET_RERANKER_SNAPSHOTS")
    snapshot_minutes: float = Field(default=10.0, ge=0.1, le=600, validation_alias="FRESHET_RERANKER_SNAPSHOT_MINUTES")
