"""`freshet similar ITEM`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.option_groups import filters
from services.cli.output import answer, console, json_command, print_warnings, table

if TYPE_CHECKING:
    from freshet.v1 import common_pb2


@json_command
@filters
def similar(
    item: Annotated[str, typer.Argument(help="Item id.")],
    *,
    user: Annotated[str, typer.Option(help="Leave out what this user has seen.")] = "",
    k: Annotated[int, typer.Option(help="How many items, 1-1000.")] = 10,
    allowed: "common_pb2.Filter",
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 2000,
) -> None:
    """List the items most similar to one item, by an exact search of the present index, which includes new items.

    Example:  freshet similar 1193 --k 5
    """
    client.check_k(k)
    from freshet.v1 import gateway_pb2

    allowed.exclude_seen = bool(user)
    request = gateway_pb2.GatewayServiceSimilarRequest(item_id=item, user_id=user, k=k, filter=allowed)
    facts = {"item_id": item, **asdict(client.ask(gateway, "Similar", request, timeout_ms))}
    for rank, one in enumerate(facts["items"], start=1):
        one |= {"rank": rank, "title": one["title"] or None}
    answer(facts, lambda: _print(facts))


def _print(facts: dict[str, Any]) -> None:
    from rich.text import Text

    shown = table("", "title", "id", "similarity", right=("", "similarity"), title=Text(f"like {facts['item_id']}"))
    for one in facts["items"]:
        shown.add_row(str(one["rank"]), Text(one["title"] or ""), Text(one["item_id"]), f"{one['similarity']:.4f}")
    console().print(shown)
    console().print(f"index {facts['index_version']} · exact · {facts['total_ms']:.1f} ms", style="dim")
    print_warnings(facts)
