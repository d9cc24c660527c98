"""`python -m services.refresher`: the refresher process."""

from services.platform.process import run_process
from services.refresher.bootstrap import run
from services.refresher.config import RefresherSettings

if __name__ == "__main__":
    raise SystemExit(run_process("refresher", RefresherSettings, run))
