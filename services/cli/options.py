"""Options that commands share, each with one name, one environment variable and one help text.

This module does not import services/stack, because that would make `freshet --help` slow.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_STATE = Path(".freshet")
DEFAULT_BUNDLE = DEFAULT_STATE / "bundle"
DEFAULT_GATEWAY = "127.0.0.1:50050"
DEFAULT_CANDIDATES = "127.0.0.1:50052"

State = Annotated[
    Path,
    typer.Option(
        "--state", envvar="FRESHET_STATE", help="The stack's state folder: its bundle, its data and its logs."
    ),
]
BundlePath = Annotated[Path, typer.Option("--bundle", envvar="FRESHET_BUNDLE", help="The model bundle.")]
StackBundle = Annotated[
    Path | None, typer.Option("--bundle", envvar="FRESHET_BUNDLE", help="The model bundle [the stack's].")
]
WithConsole = Annotated[bool, typer.Option("--console/--no-console", help="Start the console, too.")]
PortOffset = Annotated[int, typer.Option(min=0, help="Add this to every port of the stack.")]
Archive = Annotated[
    Path | None, typer.Option(help="Archive of `freshet archive`, for interactions that retention removed.")
]
On = Annotated[str | None, typer.Option(help="Run on this Ray cluster, ray://HOST:10001, which also has the bundle.")]
Kafka = Annotated[str, typer.Option(envvar="FRESHET_KAFKA_BOOTSTRAP", help="host:port [the stack's].")]
Gateway = Annotated[str, typer.Option(envvar="FRESHET_GATEWAY", help="host:port.")]
Candidates = Annotated[str, typer.Option(envvar="FRESHET_CANDIDATES", help="host:port.")]
TimeoutMs = Annotated[int, typer.Option(min=1, help="Timeout in milliseconds.")]
UserId = Annotated[str, typer.Argument(help="User id.")]
Sequence = Annotated[str, typer.Option(help="Item ids, oldest first: answer for this sequence instead.")]
Data = Annotated[
    str,
    typer.Option(help="auto, a MovieLens name, simulator, or a path: a CSV or Parquet table, or an archive's folder."),
]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds train equal models.")]
AsOf = Annotated[
    str, typer.Option(help="Answer as of this time, for replays (operators): ISO 8601 or unix seconds. Default: now.")
]
Context = Annotated[list[str] | None, typer.Option(help="key=value; may be repeated.")]


def with_options(
    command: Callable[..., Any], call: Callable[..., Any], options: Mapping[str, tuple[Any, Any]], *, without: str = ""
) -> Callable[..., Any]:
    """Return `call` with the name, help and parameters of `command`, except `without`, and further options.

    options: annotation and default by name.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    own = [one for name, one in inspect.signature(command).parameters.items() if name != without]
    for name, (annotation, default) in options.items():
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    wrapped.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in own}
    return wrapped
