"""`python -m services.generator`: the generator process."""

from services.generator.bootstrap import run
from services.generator.config import GeneratorSettings
from services.platform.process import run_process


def main() -> int:
    """Run until a signal; return the exit status."""
    return run_process("generator", GeneratorSettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
