"""`python -m services.gateway`: the gateway process."""

from services.gateway.bootstrap import run
from services.gateway.config import GatewaySettings
from services.platform.process import run_process

if __name__ == "__main__":
    raise SystemExit(run_process("gateway", GatewaySettings, run))
