"""`python -m services.encoder`: the encoder process."""

from services.encoder.bootstrap import run
from services.encoder.config import EncoderSettings
from services.platform.process import run_process

if __name__ == "__main__":
    raise SystemExit(run_process("encoder", EncoderSettings, run))
