"""The compact process's settings: the gateway's, and how many workers share its port."""

from pydantic import Field

from services.gateway.config import GatewaySettings

# Between the metrics ports of two workers.
METRICS_STEP = 100


class CompactSettings(GatewaySettings):
    """Of one process. `worker` is set by what starts several, see `workers.py`."""

    # Which of them this is; None: the only one.
    worker: int | None = Field(default=None, ge=0, le=7, validation_alias="FRESHET_COMPACT_WORKER")

    @property
    def shares_port(self) -> bool:
        return self.worker is not None

    @property
    def resolved_metrics_port(self) -> int:
        """The gateway's, and 100 more for each worker after the first."""
        port = super().resolved_metrics_port
        return port + METRICS_STEP * (self.worker or 0) if port else 0
