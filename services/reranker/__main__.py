"""`python -m services.reranker`: the reranker process."""

from services.platform.process import run_process
from services.reranker.bootstrap import run
from services.reranker.config import RerankerSettings


def main() -> int:
    """Run until a signal; return the exit status."""
    return run_process("reranker", RerankerSettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
