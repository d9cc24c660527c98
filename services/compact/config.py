"""The gateway's settings, and the number of workers."""

from pydantic import Field

from services.gateway.config import GatewaySettings

# Step between the metrics ports of workers.
METRICS_STEP = 100


class CompactSettings(GatewaySettings):
    """The gateway's settings, and the worker's number, which the parent sets (`workers.py`)."""

    # None: there is only one worker.
    worker: int | None = Field(default=None, ge=0, le=7, validation_alias="FRESHET_COMPACT_WORKER")

    @property
    def shares_port(self) -> bool:
        return self.worker is not None

    @property
    def resolved_metrics_port(self) -> int:
        """Return the gateway's metrics port, plus 100 per earlier worker; 0 if that port is 0."""
        port = super().resolved_metrics_port
        return port + METRICS_STEP * (self.worker or 0) if port else 0
