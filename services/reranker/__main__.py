"""`python -m services.reranker`: the reranker process."""

from services.platform.process import run_process
from services.reranker.bootstrap import run
from services.reranker.config import RerankerSettings

if __name__ == "__main__":
    raise SystemExit(run_process("reranker", RerankerSettings, run))
