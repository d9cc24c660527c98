"""A table of Freshet's processes, which the launcher and the commands read.

docker-compose.yml and deploy/dashboards/prometheus.yml repeat parts of this table; tests/contract compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

FULL_CPU_SHARES = 1024  # Docker's default weight of a container
HTTP_STEP = 30  # from a process' gRPC port to its HTTP port
BUNDLE, TEXT, CHECKPOINTS = "/bundle", "/text", "/var/lib/freshet/refresher"
# Folders in containers. KEYS: digests of API keys, for the gateway. SECRETS: for the encoder process and operators.
KEYS, SECRETS = "/var/lib/freshet/keys", "/var/lib/freshet/secrets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process.

    memory_mb: maximum resident MiB, with a bundle of a few megabytes and no load. holds: a file of the bundle or text
    bundle -> the maximum number of copies in memory. options: a setting -> additional MiB. extra: the name of the
    optional dependencies in pyproject.toml and of the target in deploy/Dockerfile. needs: a service that has to start
    first -> whether it has to be healthy. state: mounted folders. has_http: whether it also serves JSON. lag: a
    description of a freshness metric -> the histogram's name.
    """

    name: str
    port: int
    memory_mb: int
    extra: str
    cpu_shares: int = FULL_CPU_SHARES
    holds: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[str, bool] = field(default_factory=dict)
    state: tuple[str, ...] = (BUNDLE,)
    has_http: bool = False
    lag: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"services.{self.name}"

    @property
    def metrics_port(self) -> int:
        return self.port + 1000

    @property
    def http_port(self) -> int | None:
        return self.port + HTTP_STEP if self.has_http else None

    @property
    def port_variable(self) -> str:
        return f"FRESHET_{self.name.upper()}_PORT"

    @property
    def http_port_variable(self) -> str:
        return f"FRESHET_{self.name.upper()}_HTTP_PORT"

    @property
    def health_service(self) -> str:
        """The name of the process's gRPC service, also used in gRPC health."""
        return f"freshet.v1.{self.name.title()}Service"

    def health_of(self, model_version: str, shard: str = "") -> str:
        """Return the process's name in gRPC health for this model and shard."""
        return "/".join(filter(None, (self.health_service, model_version, shard)))


# In the order in which the commands list them.
_ROWS = (
    Process(
        name="encoder",
        port=50051,
        # Includes 256 MiB for the cache of keys and values (FRESHET_ENCODER_CACHE_MIB).
        memory_mb=440,
        extra="encode",
        holds={"encoder.onnx": 3},
        needs={"kafka": True, "redis": True, "inference-server": True},
        state=(BUNDLE, SECRETS),
        lag={"the user's state": "freshet_encoder_event_to_state_seconds"},
    ),
    Process(
        name="refresher",
        port=50054,
        memory_mb=300,
        extra="serve",
        # Callers wait for answers, not for deltas.
        cpu_shares=FULL_CPU_SHARES // 8,
        # The bundle's states take one copy's memory; every item's sums take as much as two copies.
        holds={"item_states.safetensors": 3},
        # MiB: PyTorch 500, MiniLM's weights 95, the fit on 3,000 titles 100.
        options={"FRESHET_REFRESHER_TEXT_ENCODER": 700},
        needs={"kafka": True, "redis": True},
        state=(BUNDLE, CHECKPOINTS),
        lag={"a change published by the refresher": "freshet_refresher_event_to_delta_seconds"},
    ),
    Process(
        name="candidates",
        port=50052,
        memory_mb=350,
        extra="score",
        holds={"item_states.safetensors": 2},
        lag={"the index of candidates": "freshet_candidates_index_lag_seconds"},
    ),
    Process(
        name="reranker",
        port=50053,
        memory_mb=350,
        extra="score",
        holds={"item_states.safetensors": 2},
        lag={"the index of the reranker": "freshet_reranker_index_lag_seconds"},
    ),
    Process(
        name="generator",
        port=50055,
        # The process takes 165 MiB with the demo's bundle and no text bundle.
        memory_mb=300,
        extra="generate",
        # Files of a text bundle; most of `phrases` is memory-mapped.
        holds={
            "text_mol/item_states.safetensors": 3,
            "text_mol/encoder.onnx": 1,
            "phrases/encoder.onnx": 1,
            "phrases/generator": 1,
        },
        needs={"kafka": True},
        state=(BUNDLE, TEXT),
    ),
    Process(
        name="gateway",
        port=50050,
        memory_mb=180,
        extra="serve",
        needs={
            "kafka": True,
            "redis": True,
            "encoder": False,
            "candidates": False,
            "reranker": False,
            "generator": False,
        },
        state=(BUNDLE, KEYS),
        has_http=True,
    ),
)
PROCESSES: Mapping[str, Process] = MappingProxyType({row.name: row for row in _ROWS})
# Part -> effect while it is unavailable.
EFFECTS: Mapping[str, str] = {
    "kafka": "nothing can be written, and nothing gets newer",
    "redis": "everybody gets popular items, and the stream waits",
    "inference-server": "where it encodes (FRESHET_ENCODER_ENGINE=inference-server) the stream waits",
    "encoder": "users' states stand still, and who has none gets popular items",
    "refresher": "items learn nothing: the index does not change",
    "candidates": "everybody gets popular items",
    "reranker": "answers with words, a category limit or diversity keep the first stage's order",
    "generator": "Search fails",
    "console": "no pages in a browser; answers go on",
    "gateway": "nobody is answered",
}
