"""`freshet forget USER`."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.output import CommandError, ExitStatus, answer, console, is_json, json_command, table, usage_error

if TYPE_CHECKING:
    from freshet_client import ForgetReport

_PLACES = {
    "history_events": "events of the history",
    "seen_items": "seen items",
    "query_states": "query states",
    "summed_interactions": "interactions in item states",
    "remembered_interactions": "remembered interactions",
}


@json_command
def forget(
    user: options.UserId,
    *,
    preview: Annotated[bool, typer.Option("--preview", help="Only print what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 15_000,
) -> None:
    """Forget a user exactly: history, seen items, states, and contributions to item states and memory.

    Later events count again. The removal is final, so the command shows what it would remove and asks first. Exit
    status 0: every process has applied it. 3: not every process has applied it in time, but will. 1: you answered no.

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
        if is_json() or not sys.stdin.isatty():
            raise usage_error(
                "forgetting is final, and there is no terminal to ask for confirmation",
                f"freshet forget {user} --preview, then freshet forget {user} --yes",
            )
        ask(only_preview=True)
        if not typer.confirm(f"forget user {user}?"):
            raise CommandError("nothing was removed")
    if not ask(only_preview=False).is_applied:
        raise typer.Exit(int(ExitStatus.UNAVAILABLE))


def _show(found: "ForgetReport", *, user: str, preview: bool) -> None:
    counts = {"found": dict(sorted(found.found.items())), "left": dict(sorted(found.left.items()))}
    report = {"user_id": user, "preview": preview, **asdict(found), **counts, "forget_id": found.forget_id or None}
    answer(report, lambda: _print(found, user=user, preview=preview))


def _print(answer: "ForgetReport", *, user: str, preview: bool) -> None:
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
        out.print(f"remains: {sentence}", style="dim")
    if preview:
        return
    if answer.is_applied:
        out.print(f"forgotten ({answer.forget_id})", style="green")
    else:
        out.print(
            f"on its way ({answer.forget_id}): not every process has applied it yet; freshet forget {user} --preview "
            "shows what is left",
            style="yellow",
        )
