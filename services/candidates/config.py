"""Settings of the candidates process."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from services.algorithms.indexes.by_name import parse_algorithm
from services.contracts.shards import WHOLE, Shard
from services.platform.config import ProcessSettings

MEMORY_VARIABLE = "FRESHET_CANDIDATES_MAX_MEMORY_MB"


class CandidatesSettings(ProcessSettings):
    """A field's alias is its environment variable."""

    port: int = Field(default=50052, ge=0, le=65535, validation_alias="FRESHET_CANDIDATES_PORT")
    # Algorithms with sizes, separated by spaces; "auto" chooses them by the catalogue's size. A request without an
    # algorithm gets the first one that fits its deadline.
    algorithms: str = Field(default="auto", validation_alias="FRESHET_CANDIDATES_ALGORITHMS")
    # The served shard, i/n with i from 0; a hash of its id assigns an item to a shard. "0/1" serves all items.
    shard: Annotated[Shard, NoDecode] = Field(default=WHOLE, validation_alias="FRESHET_CANDIDATES_SHARD")
    # Where items are scored: in memory, or on a CUDA device.
    device: Literal["cpu", "cuda"] = Field(default="cpu", validation_alias="FRESHET_CANDIDATES_DEVICE")
    # Memory limit of the items; 0 means the free memory of the machine.
    max_memory_mb: int = Field(default=0, ge=0, validation_alias=MEMORY_VARIABLE)
    # Share of live searches to audit.
    audit_share: float = Field(default=0.01, ge=0, le=1, validation_alias="FRESHET_CANDIDATES_AUDIT_SHARE")

    # False: the bundle is served unchanged; items withdrawn since then are still served.
    follows_topics: bool = Field(default=True, validation_alias="FRESHET_CANDIDATES_FOLLOWS_TOPICS")

    # Number of remembered interactions that vote for a query (k of PEFA-XL); 0: none are remembered.
    vote_neighbours: int = Field(default=0, ge=0, le=10_000, validation_alias="FRESHET_CANDIDATES_VOTE_NEIGHBOURS")
    # lambda of the votes: the model's weight in a final score.
    vote_model_share: float = Field(default=1.0, ge=0, le=1, validation_alias="FRESHET_CANDIDATES_VOTE_MODEL_SHARE")

    # Folder of snapshots of the changed catalogue, which shorten the start; empty: no snapshots.
    snapshots: str = Field(default="", validation_alias="FRESHET_CANDIDATES_SNAPSHOTS")

    @property
    def does_common_work(self) -> bool:
        """Whether this process writes dead letters and snapshots. Of several compact workers, only the first does."""
        return True

    @property
    def snapshot_folder(self) -> Path | None:
        if not self.snapshots:
            return None
        root = Path(self.snapshots)
        return root if self.shard.is_all else root / f"shard-{self.shard.index}-of-{self.shard.count}"

    @field_validator("shard", mode="before")
    @classmethod
    def _shard(cls, value: Any) -> Any:
        return Shard.parse(value) if isinstance(value, str) else value

    @field_validator("algorithms")
    @classmethod
    def _known(cls, text: str) -> str:
        if text == "auto":
            return text
        names = [parse_algorithm(word).text for word in text.split()]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"{text!r}; allowed: auto, or one or more distinct algorithms, separated by spaces")
        return " ".join(names)
