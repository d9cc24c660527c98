"""`freshet record`, `undo` and `forget`: write one interaction, undo one, and forget a user.

`record` and `undo` print the event id, with which a command can be repeated safely, and the freshness token for
`recommend --token`.
"""

import math
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from services.cli import client, options, output

if TYPE_CHECKING:
    from freshet_client import ForgetReport, Receipt


@output.json_command
def record(
    *,
    user: Annotated[str, Option(help="User id, 1-128 bytes.")],
    item: Annotated[str, Option(help="Item id, 1-128 bytes.")],
    kind: Annotated[str, Option("--type", help="What happened: rating, click, purchase, ... [interaction].")] = "",
    query: Annotated[str, Option(help="Words that found the item. Type: search_click, from which search learns.")] = "",
    value: Annotated[float, Option(help="Strength in the type's own unit (a rating's stars).")] = 1.0,
    event_id: Annotated[str, Option(help="Your id for this event; repeating it counts once. Empty: assigned.")] = "",
    at: Annotated[str, Option("--time", help="When it happened: ISO 8601 or unix seconds. Default: now.")] = "",
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
        raise output.usage_error(f"value={value} is not finite", "--value 5")
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


@output.json_command
def undo(
    *,
    user: Annotated[str, Option(help="User id.")],
    event_id: Annotated[str, Option(help="The event id that `freshet record` printed.")],
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
    output.answer(
        {"event_id": receipt.event_id, "token": token, **asdict(receipt.token)},
        f"{done}  event {receipt.event_id}\ntoken  {token}\nsee it: freshet recommend --user {user} --token {token}",
    )


_PLACES = {
    "history_events": "events of the history",
    "seen_items": "seen items",
    "query_states": "query states",
    "summed_interactions": "interactions in item states",
    "remembered_interactions": "remembered interactions",
}


@output.json_command
def forget(
    user: options.UserId,
    *,
    preview: Annotated[bool, Option("--preview", help="Only print what would be removed.")] = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 15_000,
) -> None:
    """Remove a user's history, seen items, states, and contributions to item states and memory, exactly.

    Later events of the user count again. The removal is final, so the command shows what it would remove and asks
    first. The exit status is 0 if every process has applied the removal, 3 if some processes have not applied it yet,
    and 1 if you answered no.

    Example:  freshet forget 42 --preview

    Example:  freshet forget 42 --yes --json
    """
    from freshet.v1 import gateway_pb2

    def ask(*, only_preview: bool) -> "ForgetReport":
        request = gateway_pb2.ForgetUserRequest(user_id=user, preview=only_preview)
        found: ForgetReport = client.ask(gateway, "ForgetUser", request, timeout_ms)
        _show(found, user=user, preview=only_preview)
        return found

    if preview:
        ask(only_preview=True)
        return
    if not yes:
        if output.is_json() or not sys.stdin.isatty():
            raise output.usage_error(
                "forgetting is final, and there is no terminal to ask for confirmation",
                f"freshet forget {user} --preview, then freshet forget {user} --yes",
            )
        ask(only_preview=True)
        if not typer.confirm(f"forget user {user}?"):
            raise output.CommandError("nothing was removed")
    if not ask(only_preview=False).is_applied:
        raise typer.Exit(int(output.ExitStatus.UNAVAILABLE))


def _show(found: "ForgetReport", *, user: str, preview: bool) -> None:
    counts = {"found": dict(sorted(found.found.items())), "left": dict(sorted(found.left.items()))}
    report = {"user_id": user, "preview": preview, **asdict(found), **counts, "forget_id": found.forget_id or None}
    output.answer(report, lambda: _print(found, user=user, preview=preview))


def _print(answer: "ForgetReport", *, user: str, preview: bool) -> None:
    from rich.text import Text

    columns = ("found",) if preview else ("found", "left")
    shown = output.table(f"user {user}", *columns, right=columns)
    for place in [*_PLACES, *sorted(answer.found.keys() - _PLACES.keys())]:
        if place not in answer.found:
            continue
        row: list[Any] = [_PLACES.get(place, place), f"{answer.found[place]:,}"]
        if not preview:
            left = answer.left.get(place, 0)
            row.append(Text(f"{left:,}", "green" if left == 0 else "yellow"))
        shown.add_row(*row)
    output.echo(shown)
    for sentence in answer.remains:
        output.echo(f"remains: {sentence}", style="dim")
    if preview:
        return
    if answer.is_applied:
        output.echo(f"forgotten ({answer.forget_id})", style="green")
    else:
        output.echo(
            f"on its way ({answer.forget_id}): not every process has applied it yet; freshet forget {user} --preview "
            "shows what is left",
            style="yellow",
        )
