"""Options and groups of options that commands share.

This module does not import services/stack, because that would make `freshet --help` slow.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

DEFAULT_STATE = Path(".freshet")
DEFAULT_BUNDLE = DEFAULT_STATE / "bundle"
DEFAULT_GATEWAY = "127.0.0.1:50050"
DEFAULT_CANDIDATES = "127.0.0.1:50052"

State = Annotated[
    Path, Option("--state", envvar="FRESHET_STATE", help="The stack's state folder: its bundle, its data and its logs.")
]
BundlePath = Annotated[Path, Option("--bundle", envvar="FRESHET_BUNDLE", help="The model bundle.")]
StackBundle = Annotated[Path | None, Option("--bundle", envvar="FRESHET_BUNDLE", help="Model bundle [the stack's].")]
WithConsole = Annotated[bool, Option("--console/--no-console", help="Start the console, too.")]
PortOffset = Annotated[int, Option(min=0, help="Add this to every port of the stack.")]
Archive = Annotated[Path | None, Option(help="Archive of `freshet archive`, for interactions that retention removed.")]
On = Annotated[str | None, Option(help="Run on this Ray cluster, ray://HOST:10001, which also has the bundle.")]
Kafka = Annotated[str, Option(envvar="FRESHET_KAFKA_BOOTSTRAP", help="host:port [the stack's].")]
Gateway = Annotated[str, Option(envvar="FRESHET_GATEWAY", help="host:port.")]
Candidates = Annotated[str, Option(envvar="FRESHET_CANDIDATES", help="host:port.")]
TimeoutMs = Annotated[int, Option(min=1, help="Timeout in milliseconds.")]
UserId = Annotated[str, Argument(help="User id.")]
Sequence = Annotated[str, Option(help="Item ids, oldest first: answer for this sequence instead.")]
Data = Annotated[str, Option(help="auto, a MovieLens name, simulator, or a path of a CSV or Parquet table or archive.")]
Seed = Annotated[int, Option(min=0, help="Equal seeds train equal models.")]
AsOf = Annotated[str, Option(help="As of this time, for replays (operators): ISO 8601 or unix seconds. Default: now.")]
Context = Annotated[list[str] | None, Option(help="key=value; may be repeated.")]


def with_options(
    command: Callable[..., Any], call: Callable[..., Any], options: Mapping[str, tuple[Any, Any]], *, without: str = ""
) -> Callable[..., Any]:
    """Return `call` with the name, help and parameters of `command`, and with the further `options`.

    The parameter `without` is left out. `options` maps each name to its annotation and default.
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


_COLUMNS = {
    "user": ("--user",),
    "item": ("--item",),
    "timestamp": ("--time", "--timestamp"),
    "type": ("--type",),
    "value": ("--value",),
    "session": ("--session",),
}
_HELP = {"session": "Column of the session, which stands for the user where there is none."}
_ITEMS = "A file of items (CSV, JSON lines, Parquet): id, title, categories; other columns are typed attributes."


def _option(kind: Any, default: Any, text: str, *flags: str) -> tuple[Any, Any]:
    return Annotated[kind, Option(*flags, help=text, rich_help_panel="Your own table")], default


def reads_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `table: TableOptions` by one option for each field."""

    def call(*args: Any, items: Path | None, category_separator: str, **given: Any) -> None:
        from services.cli.output import sentences
        from services.offline.datasets import TableOptions

        named = {role: given.pop(f"{role}_column") for role in _COLUMNS}
        columns = {role: name for role, name in named.items() if name}
        with sentences():
            table = TableOptions(columns=columns, items=items, separator=category_separator)
        command(*args, table=table, **given)

    added = {
        f"{role}_column": _option(str, "", _HELP.get(role, f"Column of the {role}, if not a usual name."), *flags)
        for role, flags in _COLUMNS.items()
    }
    added["items"] = _option(Path | None, None, _ITEMS, "--items")
    added["category_separator"] = _option(str, "|", "What separates two categories of a cell.", "--category-separator")
    return with_options(command, call, added, without="table")


_FILTER: dict[str, tuple[Any, Any]] = {
    "allow_items": (Annotated[str, Option(help="Only these item ids.")], ""),
    "deny_items": (Annotated[str, Option(help="Never these item ids.")], ""),
    "allow_categories": (Annotated[str, Option(help="Only items with one of these categories.")], ""),
    "deny_categories": (Annotated[str, Option(help="No item with one of these categories.")], ""),
    "where": (
        Annotated[
            list[str] | None,
            Option(help="A condition on an attribute, e.g. 'price<=20' or 'language in en,de'. May be repeated."),
        ],
        None,
    ),
}


def filters(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `allowed: Filter` by one option for each field."""

    def call(*args: Any, where: list[str] | None, **given: Any) -> None:
        from freshet.v1 import common_pb2

        from services.cli.client import parsed, split_ids
        from services.contracts.attributes import condition_message, parse_condition

        allowed = common_pb2.Filter(
            allow_item_ids=split_ids(given.pop("allow_items")),
            deny_item_ids=split_ids(given.pop("deny_items")),
            allow_categories=split_ids(given.pop("allow_categories")),
            deny_categories=split_ids(given.pop("deny_categories")),
            where=[condition_message(*parsed(parse_condition, text)) for text in where or ()],
        )
        command(*args, allowed=allowed, **given)

    return with_options(command, call, _FILTER, without="allowed")
