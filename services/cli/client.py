"""The command line's connection to a process, mostly the gateway: one blocking call at a time, failures as sentences.

Also speaks the two small notations a shell needs: a freshness token as `epoch:partition:offset`, and `key=value`
context. Loads gRPC only when a call is made. Knows nothing of what an answer means.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from services.cli.output import CommandError, ExitStatus

if TYPE_CHECKING:
    import grpc
    from freshet.v1 import candidates_pb2_grpc, common_pb2, gateway_pb2_grpc

DEFAULT_GATEWAY = "127.0.0.1:50050"
DEFAULT_CANDIDATES = "127.0.0.1:50052"
Response = TypeVar("Response")

_USAGE = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND", "UNIMPLEMENTED"})


@contextmanager
def gateway(target: str) -> Iterator["gateway_pb2_grpc.GatewayServiceStub"]:
    """A stub of the gateway at `target` ("host:port"); the channel closes with the block."""
    import grpc
    from freshet.v1 import gateway_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        stub_type: Any = gateway_pb2_grpc.GatewayServiceStub
        yield stub_type(channel)


@contextmanager
def candidates(target: str) -> Iterator["candidates_pb2_grpc.CandidatesServiceStub"]:
    """A stub of the candidates process at `target` ("host:port"); the channel closes with the block."""
    import grpc
    from freshet.v1 import candidates_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        stub_type: Any = candidates_pb2_grpc.CandidatesServiceStub
        yield stub_type(channel)


def call(
    method: Callable[..., Response], request: Any, *, target: str, timeout_s: float, process: str = "gateway"
) -> Response:
    """Call `method(request)` and translate a failed status into a `CommandError` that says what to do."""
    import grpc

    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise explain(error, target=target, timeout_s=timeout_s, process=process) from error


def explain(error: "grpc.RpcError", *, target: str, timeout_s: float, process: str = "gateway") -> CommandError:
    """One clear sentence, the next step and the exit status for a gRPC failure."""
    status = error.code().name
    details = str(error.details() or "no details")
    if status == "UNAVAILABLE" and _is_connection_trouble(details) and not _came_from_a_process(error):
        return CommandError(
            f"nothing answers at {target}: the {process} process is not running there",
            advice=f"`freshet up` starts it, `freshet status` shows what runs; --{process} names another address",
            status=ExitStatus.UNAVAILABLE,
        )
    if status == "UNAVAILABLE":
        return CommandError(
            f"the {process} at {target} cannot do this now: {details}",
            advice="`freshet status` shows which part is down; the same command is safe to repeat",
            status=ExitStatus.UNAVAILABLE,
        )
    if status == "DEADLINE_EXCEEDED":
        return CommandError(
            f"the {process} at {target} did not answer within {timeout_s * 1000:.0f} ms",
            advice="`freshet status` shows whether every part is healthy; --timeout-ms waits longer",
            status=ExitStatus.UNAVAILABLE,
        )
    if status == "RESOURCE_EXHAUSTED":
        return CommandError(
            f"the {process} at {target} refused early, it has too much to do: {details}",
            advice="repeat the command in a moment",
            status=ExitStatus.UNAVAILABLE,
        )
    if status in _USAGE:
        return CommandError(details, advice="see --help for an example", status=ExitStatus.USAGE)
    if status == "FAILED_PRECONDITION":
        return CommandError(details, advice="`freshet doctor` says what has to be done first", status=ExitStatus.FAILED)
    return CommandError(
        f"the {process} at {target} failed ({status}): {details}",
        advice="its log, under the stack's state folder, has the reason",
        status=ExitStatus.FAILED,
    )


def _came_from_a_process(error: "grpc.RpcError") -> bool:
    """Whether a process of ours gave the status: it then carries the request's id. What it says of connections is about
    a process behind it."""
    return any(key == "x-request-id" for key, _ in error.trailing_metadata() or ())


def _is_connection_trouble(details: str) -> bool:
    lowered = details.lower()
    return any(sign in lowered for sign in ("connect", "refused", "unreachable", "dns", "socket closed"))


def format_token(token: "common_pb2.FreshnessToken") -> str:
    """`epoch:partition:offset`, as `record` prints it and `recommend --token` takes it."""
    return f"{token.epoch}:{token.partition}:{token.offset}"


def parse_token(text: str) -> "common_pb2.FreshnessToken":
    """Read `epoch:partition:offset`. Raises CommandError (usage) when it is anything else."""
    from freshet.v1 import common_pb2

    epoch, _, position = text.partition(":")
    partition, _, offset = position.partition(":")
    if not epoch or not partition.isdecimal() or not offset.isdecimal():
        raise CommandError(
            f"token={text!r} is not a freshness token; expected epoch:partition:offset",
            advice="take the token that `freshet record` prints, for example 9f2c51aa:3:1207",
            status=ExitStatus.USAGE,
        )
    return common_pb2.FreshnessToken(epoch=epoch, partition=int(partition), offset=int(offset))


def parse_context(pairs: Sequence[str]) -> dict[str, str]:
    """`["device=tv"]` -> `{"device": "tv"}`. Raises CommandError (usage) for a pair without `=`."""
    context: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise CommandError(
                f"context={pair!r} is not key=value", advice="for example --context device=tv", status=ExitStatus.USAGE
            )
        context[key] = value
    return context


def split_ids(text: str) -> list[str]:
    """`"1193, 661"` -> `["1193", "661"]`."""
    return [part for part in (piece.strip() for piece in text.split(",")) if part]
