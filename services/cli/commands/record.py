"""`freshet record` and `freshet undo`: write one interaction through the gateway, or undo one.

Both print the event id, with which a command can be repeated safely, and the freshness token for `recommend --token`.
"""

import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import client, options
from services.cli.output import answer, json_command, usage_error

if TYPE_CHECKING:
    from freshet_client import Receipt


@json_command
def record(
    *,
    user: Annotated[str, typer.Option(help="User id, 1-128 bytes.")],
    item: Annotated[str, typer.Option(help="Item id, 1-128 bytes.")],
    kind: Annotated[
        str, typer.Option("--type", help="What happened: rating, click, purchase, ...; default: interaction.")
    ] = "",
    query: Annotated[
        str,
        typer.Option(help="The words that found the item. The type is then search_click, from which search learns."),
    ] = "",
    value: Annotated[float, typer.Option(help="Strength in the type's own unit (a rating's stars).")] = 1.0,
    event_id: Annotated[
        str, typer.Option(help="Your id for this event; repeating it counts once. Assigned when empty.")
    ] = "",
    at: Annotated[str, typer.Option("--time", help="When it happened: ISO 8601 or unix seconds. Default: now.")] = "",
    context: options.Context = None,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 5000,
) -> None:
    """Write one interaction; it is durable when the token is printed.

    Example:  freshet record --user 42 --item 1193 --type rating --value 5

    Example:  freshet record --user 42 --item 2571 --query "space movies"
    """
    from freshet.v1 import events_pb2, gateway_pb2

    from services.contracts.topics.interactions import SEARCH_CLICK

    if not math.isfinite(value):
        raise usage_error(f"value={value} is not finite", "--value 5")
    interaction = events_pb2.Interaction(
        event_id=event_id,
        user_id=user,
        item_id=item,
        type=kind or (SEARCH_CLICK if query else ""),
        value=value,
        context=client.parse_context(context or []),
        query=query,
    )
    interaction.event_time.FromNanoseconds(client.parse_time_ns("time", at) if at else time.time_ns())
    request = gateway_pb2.RecordInteractionsRequest(interactions=[interaction])
    (receipt,) = client.ask(gateway, "RecordInteractions", request, timeout_ms, field="receipts")
    _print_receipt(receipt, done="recorded", user=user)


@json_command
def undo(
    *,
    user: Annotated[str, typer.Option(help="User id.")],
    event_id: Annotated[str, typer.Option(help="The event id that `freshet record` printed.")],
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 5000,
) -> None:
    """Remove one earlier interaction of a user. An unknown event id changes nothing.

    Example:  freshet undo --user 42 --event-id 5f0c3c1e
    """
    from freshet.v1 import gateway_pb2

    request = gateway_pb2.UndoInteractionRequest(user_id=user, event_id=event_id)
    receipt = client.ask(gateway, "UndoInteraction", request, timeout_ms, field="receipt")
    _print_receipt(receipt, done=f"undo of {event_id}, if there is one, recorded", user=user)


def _print_receipt(receipt: "Receipt", *, done: str, user: str) -> None:
    token = str(receipt.token)
    answer(
        {"event_id": receipt.event_id, "token": token, **asdict(receipt.token)},
        f"{done}  event {receipt.event_id}\ntoken  {token}\nsee it: freshet recommend --user {user} --token {token}",
    )
