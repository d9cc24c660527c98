"""`python -m services.compact`: gateway, candidates and reranker in one process or several workers."""

import os

from services.compact.workers import COUNT, WORKER, WorkersSettings, keep_workers
from services.platform.process import run_process


def main() -> int:
    """Run until a signal; return the exit status."""
    if os.environ.get(COUNT, "1") != "1" and WORKER not in os.environ:
        return run_process("gateway", WorkersSettings, keep_workers)
    # The workers' parent does not import their modules.
    from services.compact.bootstrap import run
    from services.compact.config import CompactSettings

    return run_process("gateway", CompactSettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
