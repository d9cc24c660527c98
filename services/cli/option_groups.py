"""Groups of options: how to read a user's own table, and which items an answer may have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.options import with_options

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
    return Annotated[kind, typer.Option(*flags, help=text, rich_help_panel="Your own table")], default


def reads_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `table: TableOptions` by an option for each of its fields."""

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
    "allow_items": (Annotated[str, typer.Option(help="Only these item ids.")], ""),
    "deny_items": (Annotated[str, typer.Option(help="Never these item ids.")], ""),
    "allow_categories": (Annotated[str, typer.Option(help="Only items with one of these categories.")], ""),
    "deny_categories": (Annotated[str, typer.Option(help="No item with one of these categories.")], ""),
    "where": (
        Annotated[
            list[str] | None,
            typer.Option(help="A condition on an attribute, e.g. 'price<=20' or 'language in en,de'. May be repeated."),
        ],
        None,
    ),
}


def filters(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `allowed: Filter` by an option for each of its fields."""

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
