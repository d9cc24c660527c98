"""The candidates process's settings: the shared ones, the algorithms, memory, votes, audits."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from services.algorithms.indexes.by_name import parse_algorithm
from services.contracts.shards import WHOLE, Shard
from services.platform.config import ProcessSettings

MEMORY_VARIABLE = "FRESHET_CANDIDATES_MAX_MEMORY_MB"


class CandidatesSettings(ProcessSettings):
    """Variables are named per field."""

    port: int = Field(default=50052, ge=0, le=65535, validation_alias="FRESHET_CANDIDATES_PORT")
    # Names with their sizes, separated by spaces, the preferred first, for requests that name none; "auto": by the
    # catalogue's size.
    algorithms: str = Field(default="auto", validation_alias="FRESHET_CANDIDATES_ALGORITHMS")
    # The part of the catalogue that is held here, i/n with i from 0: items whose ids hash into it. "0/1": all.
    shard: Annotated[Shard, NoDecode] = Field(default=WHOLE, validation_alias="FRESHET_CANDIDATES_SHARD")
    # Where the items are scored: in this machine's memory, or copied to a CUDA card.
    device: Literal["cpu", "cuda"] = Field(default="cpu", validation_alias="FRESHET_CANDIDATES_DEVICE")
    # What the items may take; 0 is whatever the machine has left.
    max_memory_mb: int = Field(default=0, ge=0, validation_alias=MEMORY_VARIABLE)
    # The share of live searches that is answered again by brute force, in the background.
    audit_share: float = Field(default=0.01, ge=0, le=1, validation_alias="FRESHET_CANDIDATES_AUDIT_SHARE")

    # False: there is no Kafka, and none of its topics is followed. The bundle is served as it is, withdrawn items too.
    follows_topics: bool = Field(default=True, validation_alias="FRESHET_CANDIDATES_FOLLOWS_TOPICS")

    # Remembered interactions that vote for each query (k of PEFA-XL); 0: no memory is kept.
    vote_neighbours: int = Field(default=0, ge=0, le=10_000, validation_alias="FRESHET_CANDIDATES_VOTE_NEIGHBOURS")
    # lambda of the votes: a final score is this times the model's, and the rest the vote.
    vote_model_share: float = Field(default=1.0, ge=0, le=1, validation_alias="FRESHET_CANDIDATES_VOTE_MODEL_SHARE")

    # Where snapshots of what the stream changed are kept, for a start that does not read all of it; empty: none.
    snapshots: str = Field(default="", validation_alias="FRESHET_CANDIDATES_SNAPSHOTS")
    snapshot_minutes: float = Field(
        default=10.0, ge=0.1, le=600, validation_alias="FRESHET_CANDIDATES_SNAPSHOT_MINUTES"
    )

    @property
    def does_common_work(self) -> bool:
        """Whether this process does what one of several over the same topics has to do: dead letters, snapshots."""
        return True

    @property
    def snapshot_folder(self) -> Path | None:
        """Where this shard's lie; None: nowhere."""
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
