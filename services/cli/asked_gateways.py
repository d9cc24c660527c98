"""The calls of `freshet model` to gateways."""

import time
from collections.abc import Callable, Sequence

from freshet.v1 import gateway_pb2

from services.cli import client
from services.cli.output import CommandError, ExitStatus

_ASK_S = 10.0


def ask_gateways(gateways: Sequence[str]) -> dict[str, gateway_pb2.GetVersionSetsResponse]:
    """Return the version sets of each gateway. Raises: CommandError for one that does not answer."""
    answers = {}
    for target in gateways:
        with client.gateway(target) as asked:
            answers[target] = asked.call("GetVersionSets", gateway_pb2.GetVersionSetsRequest(), timeout_s=_ASK_S)
    return answers


def wait_for_gateways(
    gateways: Sequence[str], revision: int, is_done: Callable[[gateway_pb2.GetVersionSetsResponse], str], wait_s: float
) -> None:
    """Wait until every gateway applies `revision` or a later one and `is_done` returns no problem for it.

    Raises: CommandError with the problems after `wait_s`.
    """
    until = time.monotonic() + wait_s
    while True:
        complaints = {
            target: f"it applies revision {answer.revision}, not {revision}"
            if answer.revision < revision
            else is_done(answer)
            for target, answer in ask_gateways(gateways).items()
        }
        left = [f"gateway {target}: {why}" for target, why in complaints.items() if why]
        if not left:
            return
        if time.monotonic() > until:
            raise CommandError("; ".join(left), status=ExitStatus.UNAVAILABLE)
        time.sleep(0.1)


def problem_of(name: str) -> Callable[[gateway_pb2.GetVersionSetsResponse], str]:
    """Return a function that returns a gateway's problem with this set, or "". A set that is missing or not ready is a
    problem.
    """

    def complain(answer: gateway_pb2.GetVersionSetsResponse) -> str:
        found = next((one for one in answer.sets if one.set.name == name), None)
        if found is None:
            return f"it knows no set {name!r}"
        return "" if found.ready else f"set {name!r}: {found.problem}"

    return complain
