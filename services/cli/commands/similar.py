"""`freshet similar ITEM`: the items most like one item, by item states."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.answers import degradation_names
from services.cli.output import console, emit_json, reports_errors, table

if TYPE_CHECKING:
    from freshet.v1 import gateway_pb2


@reports_errors
def similar(
    item: Annotated[str, typer.Argument(help="Item id.")],
    *,
    user: Annotated[str, typer.Option(help="Leave out what this user has seen.")] = "",
    k: Annotated[int, typer.Option(help="How many items, 1-1000.")] = 10,
    allow_items: options.AllowItems = "",
    deny_items: options.DenyItems = "",
    allow_categories: options.AllowCategories = "",
    deny_categories: options.DenyCategories = "",
    where: options.Where = None,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 2000,
    as_json: options.AsJson = False,
) -> None:
    """List the items most similar to one item, by an exact search of the present index, which includes new items.

    Example:  freshet similar 1193 --k 5
    """
    client.check_k(k)
    from freshet.v1 import gateway_pb2

    request = gateway_pb2.GatewayServiceSimilarRequest(
        item_id=item,
        user_id=user,
        k=k,
        filter=client.filter_of(
            allow_items, deny_items, allow_categories, deny_categories, where or (), exclude_seen=bool(user)
        ),
    )
    with client.gateway(gateway) as asked:
        answer = asked.call("Similar", request, timeout_s=timeout_ms / 1000)
    facts = as_dict(answer, item)
    if as_json:
        emit_json(facts)
    else:
        _print(facts)


def as_dict(answer: "gateway_pb2.GatewayServiceSimilarResponse", item: str) -> dict[str, Any]:
    """Return the whole answer for `--json`."""
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
    for warning in facts["warnings"]:
        console().print(warning, style="yellow", markup=False)
    for one in facts["degradations"]:
        console().print(f"degraded: {one}", style="yellow")
