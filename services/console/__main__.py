"""`python -m services.console`: the console."""

from services.console.bootstrap import run
from services.console.config import ConsoleSettings
from services.platform.process import run_process


def main() -> int:
    """Run until a signal; return the exit status."""
    return run_process("console", ConsoleSettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
