"""The commands `freshet items put` and `freshet items withdraw` change items, including items the model lacks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from services.cli import client, options
from services.cli.output import CommandError, answer, group_command, usage_error

if TYPE_CHECKING:
    from freshet.v1 import events_pb2

app = typer.Typer(name="items", help="Add, change and withdraw items.", no_args_is_help=True)

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
# Items per request. An item has at most 17 kB, so a request stays below its limit of 4 MB.
_BATCH = 200
# The beginning of the gateway's error for one item of a request.
_REFUSED = re.compile(r"items\[(\d+)\]")
_FIELDS = frozenset({"item_id", "title", "categories", "attributes", "available", "withdrawn"})


@group_command(app)
def put(
    item: Annotated[str, Argument(help="Item id, 1-128 bytes; or --file.")] = "",
    *,
    title: Annotated[str, Option(help="At most 512 bytes.")] = "",
    category: Annotated[list[str] | None, Option(help="A category, for filters; may be repeated.")] = None,
    attribute: Annotated[
        list[str] | None, Option(help="name=value, e.g. price=9.5 or released=2026-01-01; may be repeated.")
    ] = None,
    unavailable: Annotated[bool, Option("--unavailable", help="As unavailable: answers leave it out for now.")] = False,
    file: Annotated[
        Path | None, Option(help="JSON lines: item_id, optionally title, categories, attributes, available, withdrawn.")
    ] = None,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 5000,
) -> None:
    """Add an item, or replace its title, categories, attributes and availability; this also restores a withdrawn item.

    Omitted fields become empty. A new item can be recommended once a few users have interacted with it (the operator's
    m), or at once if the refresher encodes texts.

    Example:  freshet items put new-1 --title "A Trip to the Moon" --category Sci-Fi

    Example:  freshet items put --file catalogue.jsonl
    """
    from freshet.v1 import events_pb2

    if bool(item) == (file is not None):
        raise usage_error("give either one item id or --file", 'freshet items put new-1 --title "A Trip to the Moon"')
    if file is not None:
        named = dict(_read(file))
    else:
        one = events_pb2.Item(item_id=item, title=title, categories=category or [], available=not unavailable)
        named = {item: one}
        for pair in attribute or ():
            name, equals, value = pair.partition("=")
            if not equals or not name:
                raise usage_error(f"attribute={pair!r} is not name=value", "for example --attribute price=9.5")
            client.put_attribute(one, name, value)
    _write(named, gateway=gateway, timeout_ms=timeout_ms, done="put")


@group_command(app)
def withdraw(
    item: Annotated[list[str], Argument(help="One or more item ids.")],
    *,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 5000,
) -> None:
    """Remove items from all answers. Their feedback is kept, so that `put` restores them.

    Example:  freshet items withdraw new-1 new-2
    """
    from freshet.v1 import events_pb2

    named = {item_id: events_pb2.Item(item_id=item_id, withdrawn=True) for item_id in item}
    _write(named, gateway=gateway, timeout_ms=timeout_ms, done="withdrawals written (ids are not checked)")


def _write(named: "dict[str, events_pb2.Item]", *, gateway: str, timeout_ms: int, done: str) -> None:
    """Write the items. The keys of `named` are names for error messages, either an id or "items.jsonl:7"."""
    from freshet.v1 import gateway_pb2

    names, messages, written = list(named), list(named.values()), 0
    try:
        with client.gateway(gateway) as asked:
            for start in range(0, len(messages), _BATCH):
                request = gateway_pb2.PutItemsRequest(items=messages[start : start + _BATCH])
                written += asked.call("PutItems", request, timeout_s=timeout_ms / 1000).num_written
    except CommandError as error:
        if refused := _REFUSED.match(error.message):
            error.message = f"{names[start + int(refused[1])]}: {error.message}"
        if written:
            error.message += f" ({written:,} of {len(messages):,} items were written before)"
        raise
    answer({"num_written": written}, f"{done}: {written:,} {'item' if written == 1 else 'items'}")


def _read(path: Path) -> "Iterator[tuple[str, events_pb2.Item]]":
    """Yield "file:line" and item. Raises: CommandError (usage) naming line and field."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error(f"{path} cannot be read: {error}") from error
    found = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found += 1
            yield (where := f"{path}:{number}"), _item(line, where=where)
    if not found:
        raise usage_error(f"{path} holds no item")


def _item(line: str, *, where: str) -> "events_pb2.Item":
    from freshet.v1 import events_pb2

    from services.platform.errors import InvalidRequest
    from services.platform.http import json_requests

    def refused(problem: str) -> CommandError:
        advice = 'one object a line, e.g. {"item_id": "new-1", "title": "A Trip to the Moon"}'
        return usage_error(f"{where}: {problem}", advice)

    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refused(f"not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("item_id"), str):
        raise refused("no object with an item_id, which is a string")
    if unknown := sorted(row.keys() - _FIELDS):
        raise refused(f"{unknown[0]}: allowed fields: {', '.join(sorted(_FIELDS))}")
    attributes = row.pop("attributes", None) or {}
    if not isinstance(attributes, dict):
        raise refused(f"attributes={attributes!r:.80} allowed: an object of numbers, dates and strings by name")
    try:
        item = cast(events_pb2.Item, json_requests.parse(json.dumps(row).encode(), events_pb2.Item))
        for name, value in attributes.items():
            client.put_attribute(item, name, f'"{value}"' if _is_tag(value) else value)
    except (InvalidRequest, CommandError) as error:
        raise refused(error.message.removeprefix("JSON: ")) from error
    return item


def _is_tag(value: object) -> bool:
    """Return whether `value` is a JSON string other than a date. For example, "7" stays a string."""
    return isinstance(value, str) and not _DATE.match(value)
