"""`python -m services.console`: the console."""

import sys

# Optional imports of python-socketio and structlog that a console never uses. They would add 31 MB.
_UNUSED = ("aiohttp", "kafka", "redis", "requests", "rich", "websocket")


def main() -> int:
    """Run until a signal; return the exit status."""
    sys.modules.update(dict.fromkeys(_UNUSED))  # type: ignore[arg-type]
    from services.console.bootstrap import run
    from services.console.config import ConsoleSettings
    from services.platform.process import run_process

    return run_process("console", ConsoleSettings, run)


if __name__ == "__main__":
    raise SystemExit(main())
