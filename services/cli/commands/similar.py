"""`freshet similar ITEM`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.answers import degradation_names, print_warnings
from services.cli.option_groups import filters
from services.cli.output import answer, console, json_command, table

if TYPE_CHECKING:
    from freshet.v1 import common_pb2, gateway_pb2


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
    facts = _facts(client.ask(gateway, "Similar", request, timeout_ms), item)
    answer(facts, lambda: _print(facts))


def _facts(answer: "gateway_pb2.GatewayServiceSimilarResponse", item: str) -> dict[str, Any]:
    return {
        "item_id": item,
        "items": [
            {"rank": rank, "item_id": one.item_id, "title": one.title or None, "similarity": one.similarity}
            for rank, one in enumerate(answer.items, start=1)
        ],
        "model_version": answer.model_version,
        "index_version": answer.index_version,
        "certificate": client.plain(answer.certificate),
        "degradations": degradation_names(answer),
        "warnings": list(answer.warnings),
        "total_ms": answer.total_ms,
        "request_id": answer.request_id,
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.text import Text

    shown = table("", "title", "id", "similarity", right=("", "similarity"), title=Text(f"like {facts['item_id']}"))
    for one in facts["items"]:
        shown.add_row(str(one["rank"]), Text(one["title"] or ""), Text(one["item_id"]), f"{one['similarity']:.4f}")
    console().print(shown)
    console().print(f"index {facts['index_version']} · exact · {facts['total_ms']:.1f} ms", style="dim")
    print_warnings(facts)
