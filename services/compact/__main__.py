"""`python -m services.compact`: the gateway's process, with candidates and the reranker in it, or several of them."""

import os

from services.compact.workers import COUNT, WORKER, WorkersSettings, keep_workers
from services.platform.process import run_process


def main() -> int:
    """Run until a signal; return the exit status."""
    if os.environ.get(COUNT, "1") != "1" and WORKER not in os.environ:
        return run_process("gateway", WorkersSettings, keep_workers)
    # What starts workers loads nothing of what they need.
    from services.compact.bootstrap import run
    from services.compact.config import CompactSettings

    return run_process("gateway", CompactSettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
