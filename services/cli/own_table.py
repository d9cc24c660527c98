"""The options for reading a user's own table: one set for every command that reads data."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

_COLUMNS = {
    "user": ("--user",),
    "item": ("--item",),
    "timestamp": ("--time", "--timestamp"),
    "type": ("--type",),
    "value": ("--value",),
    "session": ("--session",),
}
_HELP = {"session": "Column of the session, which stands for the user where there is none."}
_PANEL = "Your own table"


def reads_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with a parameter `table: TableOptions` options for each of its fields."""

    @functools.wraps(command)
    def wrapped(*, items: Path | None, category_separator: str, **given: Any) -> None:
        from services.cli.output import sentences
        from services.offline.datasets import TableOptions

        named = {role: given.pop(f"{role}_column") for role in _COLUMNS}
        columns = {role: name for role, name in named.items() if name}
        with sentences():
            table = TableOptions(columns=columns, items=items, separator=category_separator)
        command(table=table, **given)

    def option(name: str, kind: Any, default: Any, *flags: str, help_text: str) -> inspect.Parameter:
        annotation = Annotated[kind, typer.Option(*flags, help=help_text, rich_help_panel=_PANEL)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    own = [one for one in inspect.signature(command).parameters.values() if one.name != "table"]
    own += [
        option(
            f"{role}_column", str, "", *flags, help_text=_HELP.get(role, f"Column of the {role}, if not a usual name.")
        )
        for role, flags in _COLUMNS.items()
    ]
    what = "A file of items (CSV, JSON lines, Parquet): id, title, categories; other columns are typed attributes."
    own.append(option("items", Path | None, None, "--items", help_text=what))
    separator = "What separates two categories of a cell."
    own.append(option("category_separator", str, "|", "--category-separator", help_text=separator))
    wrapped.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in own}
    return wrapped
