"""The candidates process's settings: the shared ones, the algorithm, and the sizes of batches and memory."""

from typing import Literal

from pydantic import Field

from services.common.config import ProcessSettings

MEMORY_VARIABLE = "FRESHET_CANDIDATES_MAX_MEMORY_MB"


class CandidatesSettings(ProcessSettings):
    """Variables are named per field."""

    port: int = Field(default=50052, ge=0, le=65535, validation_alias="FRESHET_CANDIDATES_PORT")
    # For requests that name none.
    algorithm: Literal["brute_force", "top_k_avg"] = Field(
        default="brute_force", validation_alias="FRESHET_CANDIDATES_ALGORITHM"
    )
    # N of top_k_avg at stage FULL; at stage FIRST the request's k is the pool.
    top_k_avg_pool_size: int = Field(
        default=1000, ge=1, le=1_000_000, validation_alias="FRESHET_CANDIDATES_TOP_K_AVG_POOL_SIZE"
    )
    # What the items may take; 0 is whatever the machine has left.
    max_memory_mb: int = Field(default=0, ge=0, validation_alias=MEMORY_VARIABLE)
    # Searches computed together; more wait, and beyond the queue they are refused.
    max_batch: int = Field(default=32, ge=1, le=1024, validation_alias="FRESHET_CANDIDATES_MAX_BATCH")
    max_queue: int = Field(default=256, ge=1, le=100_000, validation_alias="FRESHET_CANDIDATES_MAX_QUEUE")
