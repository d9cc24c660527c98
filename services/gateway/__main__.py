"""`python -m services.gateway`: the gateway process."""

from services.gateway.bootstrap import run
from services.gateway.config import GatewaySettings
from services.platform.process import run_process


def main() -> int:
    """Run until a signal; return the exit status."""
    return run_process("gateway", GatewaySettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
