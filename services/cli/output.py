"""The output of commands: exit statuses, errors in one sentence, tables or JSON.

A command raises `CommandError` for a failure. `reports_errors` prints it and sets the exit status. This module does not
import gRPC.
"""

import functools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from services.cli.options import with_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from services.stack.components.component import Say

_options: ContextVar[frozenset[str]] = ContextVar("options of the command that runs", default=frozenset())
_json: ContextVar[bool] = ContextVar("whether the command that runs has --json", default=False)
_AS_JSON = (Annotated[bool, Option("--json", help="One JSON object on stdout.")], False)
# Control characters except line feed and tab, and the marks that change the direction of text.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class ExitStatus(IntEnum):
    """The meaning of a command's exit status."""

    OK = 0
    FAILED = 1  # the command tried and failed
    USAGE = 2  # the request itself is wrong; repeating it changes nothing
    UNAVAILABLE = 3  # something is not running, not ready or too slow; repeating it later may work
    INTERRUPTED = 130  # Ctrl-C


class CommandError(Exception):
    """A command's failure in one sentence, with advice and the exit status."""

    def __init__(self, message: str, *, advice: str = "", status: ExitStatus = ExitStatus.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.status = status


def usage_error(message: str, advice: str = "") -> CommandError:
    """Return an error for an invalid request."""
    return CommandError(message, advice=advice, status=ExitStatus.USAGE)


def if_option(name: str, advice: str) -> str:
    """Return the advice if the running command has the option `name` (for example "timeout_ms"), else ""."""
    return advice if name in _options.get() else ""


@contextmanager
def sentences(
    *failures: type[Exception], bad_bundle: str = "`freshet train` makes a bundle", no_memory: str = ""
) -> Iterator[None]:
    """Turn Freshet's own exceptions about data, settings, bundles, the stack and dependencies into a `CommandError`.

    `failures` are further exceptions whose message is the sentence. Other exceptions are bugs and are not caught.
    """
    try:
        yield
    except Exception as error:
        found = _sentence(error, failures, bad_bundle, no_memory)
        if found is None:
            raise
        raise found from error


def _sentence(
    error: Exception, failures: tuple[type[Exception], ...], bad_bundle: str, no_memory: str
) -> CommandError | None:
    from services.algorithms.bundles.model_manifest import BundleError
    from services.platform.errors import DependencyUnavailable, FreshetError
    from services.stack.errors import StackError

    match error:
        case StackError():
            return CommandError(f"{error.part}: {error.problem}", advice=error.advice)
        case DependencyUnavailable():
            return CommandError(str(error), advice="`freshet up` starts the stack", status=ExitStatus.UNAVAILABLE)
        case BundleError():
            return CommandError(str(error), advice=bad_bundle)
        case FreshetError():
            return CommandError(str(error))
        case MemoryError():
            return CommandError(str(error) or "there is not enough memory", advice=no_memory)
        case _ if isinstance(error, failures):
            return CommandError(str(error))
        case ValueError():
            return usage_error(str(error), "see --help for an example")
    return None


def printable(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return _STEERING.sub("", text)


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console on stdout (or stderr) that shows ids and titles literally, without markup or escape
    sequences.

    rich is imported here, because its import takes longer than most commands.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class Literal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            # The terminal wraps text; rich wraps only tables.
            options.setdefault("soft_wrap", all(isinstance(one, str | Text) for one in objects))
            super().print(*objects, **options)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return Literal(stderr=stderr, highlight=False, markup=False, emoji=False)


def echo(*objects: Any, style: str | None = None) -> None:
    """Print texts or tables on stdout."""
    console().print(*objects, style=style)


def table(*columns: str, rows: Iterable[Iterable[Any]] = (), right: Collection[str] = (), **style: Any) -> "Table":
    """Return a plain table of texts. The columns in `right` are right-aligned."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, title_justify="left", **({"header_style": "dim"} | style))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for cells in rows:
        made.add_row(*cells)
    return made


@contextmanager
def stack_progress() -> Iterator["Say"]:
    """Yield the function that shows the steps of a stack's parts on stderr; without effect under --json."""
    from services.stack.display import showing

    with showing(None if is_json() else console(stderr=True)) as say:
        yield say


@contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Yield `update(what, done, total, note="")`, which moves the bar of `what`; bars are on stderr under --json."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=is_json()), refresh_per_second=2) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int | None, note: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total, description=what + note)

        yield update


def print_warnings(facts: Mapping[str, Any]) -> None:
    """Print an answer's warnings and degradations."""
    for warning in facts["warnings"]:
        echo(warning, style="yellow")
    if facts["degradations"]:
        echo(f"degraded: {', '.join(facts['degradations'])}", style="yellow")


def is_json() -> bool:
    """Return whether the running command has --json."""
    return _json.get()


def answer(value: Any, shown: str | Callable[[], object]) -> None:
    """Print a command's result: `value` under --json, else the text `shown`, or what `shown()` prints."""
    if is_json():
        emit_json(value)
    elif callable(shown):
        shown()
    else:
        typer.echo(shown)


def emit_json(value: Any) -> None:
    """Write one JSON object as one line on stdout, where `--json` allows no other output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False, default=utc_text) + "\n")
    sys.stdout.flush()


def utc_text(moment: datetime) -> str:
    """Return an aware time as ISO 8601 with milliseconds: `2026-11-21T09:30:00.250Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def report(error: CommandError, *, as_json: bool) -> None:
    """Print an error and its advice as JSON on stdout or as text on stderr."""
    if as_json:
        emit_json({"error": error.message, "advice": error.advice, "exit_status": int(error.status)})
        return
    advice = f"  try: {error.advice}\n" if error.advice else ""
    sys.stderr.write(printable(f"error: {error.message}\n{advice}"))


def json_command(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a typer command as `reports_errors` does, and give it the option --json."""
    return with_options(command, reports_errors(command), {"as_json": _AS_JSON})


def group_command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command with --json in a group."""

    def register(command: Callable[..., None]) -> Callable[..., None]:
        wrapped = json_command(command)
        group.command(name)(wrapped)
        return wrapped

    return register


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a typer command: `CommandError` and Ctrl-C become a message and an exit status instead of a traceback.

    Errors about files that cannot be read or written, and about arguments that are not UTF-8, are treated alike. Other
    exceptions are bugs and keep their traceback. Logs go to stderr, because stdout has the command's result.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool = False, **kwargs: Any) -> None:
        _log_to_stderr()
        _options.set(frozenset(kwargs))
        _json.set(as_json)
        try:
            command(*args, **kwargs)
        except (CommandError, OSError, UnicodeEncodeError) as error:
            if (failure := _command_error(error)) is None:
                raise
            report(failure, as_json=as_json)
            raise typer.Exit(int(failure.status)) from error
        except KeyboardInterrupt as interrupt:
            sys.stderr.write("interrupted\n")
            raise typer.Exit(int(ExitStatus.INTERRUPTED)) from interrupt

    return wrapped


def _command_error(error: CommandError | OSError | UnicodeEncodeError) -> CommandError | None:
    match error:
        case CommandError():
            return error
        case UnicodeEncodeError() if error.encoding == "utf-8":
            return usage_error(f"{error.object[:80]!r} is not valid UTF-8")
        case OSError() if error.filename is not None:
            return usage_error(f"{error.filename2 or error.filename}: {error.strerror}")
    return None


def _log_to_stderr() -> None:
    try:
        import structlog
    except ModuleNotFoundError:  # `freshet bench gpu` needs no package that logs
        return
    # sys.stderr is read at each log call, because tests replace and close it.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


_UNITS = (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("min", 60))


def duration(seconds: float) -> str:
    """Return the duration in its largest fitting unit: `"3.2 d"`, `"45.0 s"`, `"120 ms"`."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 or seconds <= 0 else f"{seconds * 1000:.0f} ms"
