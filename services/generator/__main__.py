"""`python -m services.generator`: the generator process."""

from services.generator.bootstrap import run
from services.generator.config import GeneratorSettings
from services.platform.process import run_process

if __name__ == "__main__":
    raise SystemExit(run_process("generator", GeneratorSettings, run))
