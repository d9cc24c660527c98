"""What a person or a machine sees of a command: exit statuses, errors in one sentence, tables or JSON.

Every command raises `CommandError` for an outcome that is not its success; `reports_errors` turns it into a sentence
with the next step on stderr (or one JSON object on stdout with `--json`) and the exit status. Knows nothing of gRPC.
"""

import functools
import json
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")


class ExitStatus(IntEnum):
    """What a command's exit status says."""

    OK = 0
    FAILED = 1  # it was tried and did not work
    USAGE = 2  # the request itself is wrong; repeating it changes nothing
    UNAVAILABLE = 3  # something is not running, not ready or too slow; repeating it later may work
    INTERRUPTED = 130  # Ctrl-C


class CommandError(Exception):
    """A command did not reach its success: one sentence, what to do about it, and the exit status."""

    def __init__(self, message: str, *, advice: str = "", status: ExitStatus = ExitStatus.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.status = status


def console(*, stderr: bool = False) -> "Console":
    """A rich console on stdout (or stderr); built on use, since importing rich costs more than most commands."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def emit_json(value: Any) -> None:
    """Write one JSON object on one line of stdout: the whole output of a command under `--json`."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def report(error: CommandError, *, as_json: bool) -> None:
    """Say what went wrong, and what to do, in the form that was asked for."""
    if as_json:
        emit_json({"error": error.message, "advice": error.advice, "exit_status": int(error.status)})
        return
    sys.stderr.write(f"error: {error.message}\n")
    if error.advice:
        sys.stderr.write(f"  try: {error.advice}\n")


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a typer command: `CommandError` and Ctrl-C become a message and an exit status, never a traceback.

    Reads the command's own `as_json` option to choose the form. Other exceptions are bugs and keep their traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except CommandError as error:
            report(error, as_json=bool(kwargs.get("as_json", False)))
            raise typer.Exit(int(error.status)) from error
        except KeyboardInterrupt as interrupt:
            sys.stderr.write("interrupted\n")
            raise typer.Exit(int(ExitStatus.INTERRUPTED)) from interrupt

    return wrapped
