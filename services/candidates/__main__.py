"""`python -m services.candidates`: the candidates process."""

from services.candidates.bootstrap import run
from services.candidates.config import CandidatesSettings
from services.platform.process import run_process

if __name__ == "__main__":
    raise SystemExit(run_process("candidates", CandidatesSettings, run))
