"""`python -m services.compact`: the gateway's process, with candidates and the reranker in it."""

from services.common.process import run_process
from services.compact.bootstrap import run
from services.gateway.config import GatewaySettings


def main() -> int:
    """Run until a signal; return the exit status."""
    return run_process("gateway", GatewaySettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
