"""`freshet forget USER`: remove a user from all that learned from the user's events, and report what was removed.

It first shows what would be removed, asks for confirmation, then removes. The gateway does the work; this module only
shows its report.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.output import CommandError, ExitStatus, console, emit_json, reports_errors, table, usage_error

if TYPE_CHECKING:
    from freshet.v1 import gateway_pb2

_PLACES = {
    "history_events": "events of the history",
    "seen_items": "seen items",
    "query_states": "query states",
    "summed_interactions": "interactions in item states",
    "remembered_interactions": "remembered interactions",
}


@reports_errors
def forget(
    user: options.UserId,
    *,
    preview: Annotated[bool, typer.Option("--preview", help="Only print what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 15_000,
    as_json: options.AsJson = False,
) -> None:
    """Forget a user exactly: history, seen items, states, and contributions to item states and memory.

    Later events count again. The removal is final, so the command shows what it would remove and asks first. Exit
    status 0: every process has applied it. 3: the time ran out first; it will still be applied. 1: you answered no.

    Example:  freshet forget 42 --preview

    Example:  freshet forget 42 --yes --json
    """
    from freshet.v1 import gateway_pb2

    with client.gateway(gateway) as asked:

        def ask(*, only_preview: bool) -> "gateway_pb2.ForgetUserResponse":
            request = gateway_pb2.ForgetUserRequest(user_id=user, preview=only_preview)
            answer: gateway_pb2.ForgetUserResponse = asked.call("ForgetUser", request, timeout_s=timeout_ms / 1000)
            return answer

        if preview:
            _show(ask(only_preview=True), user=user, preview=True, as_json=as_json)
            return
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise usage_error(
                    "forgetting is final, and there is no terminal to ask for confirmation",
                    f"freshet forget {user} --preview, then freshet forget {user} --yes",
                )
            _show(ask(only_preview=True), user=user, preview=True, as_json=False)
            if not typer.confirm(f"forget user {user}?"):
                raise CommandError("nothing was removed")
        answer = ask(only_preview=False)
    _show(answer, user=user, preview=False, as_json=as_json)
    if not answer.is_applied:
        raise typer.Exit(int(ExitStatus.UNAVAILABLE))


def as_dict(answer: "gateway_pb2.ForgetUserResponse", *, user: str, preview: bool) -> dict[str, Any]:
    """Return the report for `--json`."""
    return {
        "user_id": user,
        "preview": preview,
        "forget_id": answer.forget_id or None,
        "found": dict(sorted(answer.found.items())),
        "left": dict(sorted(answer.left.items())),
        "is_applied": answer.is_applied,
        "remains": list(answer.remains),
    }


def _show(answer: "gateway_pb2.ForgetUserResponse", *, user: str, preview: bool, as_json: bool) -> None:
    if as_json:
        emit_json(as_dict(answer, user=user, preview=preview))
        return
    from rich.text import Text

    columns = ("found",) if preview else ("found", "left")
    shown = table(f"user {user}", *columns, right=columns)
    for place in [*_PLACES, *sorted(answer.found.keys() - _PLACES.keys())]:
        if place not in answer.found:
            continue
        row: list[Any] = [_PLACES.get(place, place), f"{answer.found[place]:,}"]
        if not preview:
            left = answer.left.get(place, 0)
            row.append(Text(f"{left:,}", "green" if left == 0 else "yellow"))
        shown.add_row(*row)
    out = console()
    out.print(shown)
    for sentence in answer.remains:
        out.print(f"remains: {sentence}", style="dim", soft_wrap=True)
    if preview:
        return
    if answer.is_applied:
        out.print(f"forgotten ({answer.forget_id})", style="green")
    else:
        out.print(
            f"on its way ({answer.forget_id}): not every process has applied it yet; freshet forget {user} --preview "
            "shows what is left",
            style="yellow",
            soft_wrap=True,
        )
