"""The command line's connection to a process, mostly the gateway: one blocking call at a time, failures as sentences.

Also speaks the small notations a shell needs: a freshness token as `epoch:partition:offset`, `key=value` context, and
moments. Loads gRPC only when a call is made. Knows nothing of what an answer means.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, TypeVar

from services.cli.output import CommandError, ExitStatus, if_option, sentences, usage_error
from services.contracts.processes import HTTP_STEP

if TYPE_CHECKING:
    import grpc
    from freshet.v1 import candidates_pb2_grpc, common_pb2, events_pb2, gateway_pb2_grpc
    from google.protobuf.message import Message
from pathlib import Path

Response = TypeVar("Response")

# The years 1 to 9999, which the wire carries.
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799

_USAGE = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND", "UNIMPLEMENTED"})


@contextmanager
def gateway(target: str) -> Iterator["gateway_pb2_grpc.GatewayServiceStub"]:
    """A stub of the gateway at `target` ("host:port"); the channel closes with the block."""
    from freshet.v1 import gateway_pb2_grpc

    stub: Any = gateway_pb2_grpc.GatewayServiceStub
    with _channel(target) as channel:
        yield stub(channel)


@contextmanager
def candidates(target: str) -> Iterator["candidates_pb2_grpc.CandidatesServiceStub"]:
    """A stub of the candidates process at `target` ("host:port"); the channel closes with the block."""
    from freshet.v1 import candidates_pb2_grpc

    stub: Any = candidates_pb2_grpc.CandidatesServiceStub
    with _channel(target) as channel:
        yield stub(channel)


def _channel(target: str) -> "grpc.Channel":
    from services.platform.config import environment_tls
    from services.platform.rpc.client import blocking_channel

    with sentences():
        return blocking_channel(target, environment_tls())


def call(
    method: Callable[..., Response], request: Any, *, target: str, timeout_s: float, process: str = "gateway"
) -> Response:
    """Call `method(request)` and translate a failed status into a `CommandError` that says what to do.

    The gateway is shown the API key of FRESHET_API_KEY, where there is one.
    """
    import grpc

    from services.platform.rpc.client import api_key_metadata

    metadata = api_key_metadata() if process == "gateway" else ()
    shown: dict[str, Any] = {"metadata": metadata} if metadata else {}
    try:
        return method(request, timeout=timeout_s, **shown)
    except grpc.RpcError as error:
        raise explain(error, target=target, timeout_s=timeout_s, process=process) from error


def explain(error: "grpc.RpcError", *, target: str, timeout_s: float, process: str = "gateway") -> CommandError:
    """One clear sentence, the next step and the exit status for a gRPC failure."""
    status = error.code().name
    details = str(error.details() or "no details")
    from_process = _came_from_a_process(error)
    if status == "UNAVAILABLE" and "handshake" in details.lower() and not from_process:
        return CommandError(
            f"the {process} at {target} and this command do not believe each other's certificates: {details}",
            advice="FRESHET_TLS_CERT, FRESHET_TLS_KEY and FRESHET_TLS_CA name what `freshet certs` made",
            status=ExitStatus.UNAVAILABLE,
        )
    if status == "UNAVAILABLE" and "http1.x" in details:
        return usage_error(f"{target} speaks HTTP/1.1, not gRPC", f"gRPC's port is the JSON port's less {HTTP_STEP}")
    if status == "UNAVAILABLE" and _is_connection_trouble(details) and not from_process:
        advice = "`freshet up` starts it, `freshet status` shows what runs"
        return CommandError(
            f"nothing answers at {target}: the {process} process is not running there",
            advice=advice + if_option(process, f"; --{process} names another address"),
            status=ExitStatus.UNAVAILABLE,
        )
    if is_too_large(error):
        return usage_error(f"the request is too large for {target}: {details}", "ask for less at a time")
    if status in _USAGE:
        return usage_error(details, "see --help for an example")
    if status == "FAILED_PRECONDITION":
        return CommandError(details, advice="`freshet doctor` says what has to be done first")
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return CommandError(details, advice="FRESHET_API_KEY holds the key to use; `freshet keys create` makes one")
    later = {
        "UNAVAILABLE": (
            f"cannot do this now: {details}",
            "`freshet status` shows which part is down; the same command is safe to repeat",
        ),
        "DEADLINE_EXCEEDED": (
            f"did not answer within {timeout_s * 1000:.0f} ms",
            "`freshet status` shows whether every part is healthy"
            + if_option("timeout_ms", "; --timeout-ms waits longer"),
        ),
        "RESOURCE_EXHAUSTED": (
            f"refused early, it has too much to do: {details}",
            "repeat the command in a moment",
        ),
    }
    if status in later:
        said, advice = later[status]
        return CommandError(f"the {process} at {target} {said}", advice=advice, status=ExitStatus.UNAVAILABLE)
    return CommandError(
        f"the {process} at {target} failed ({status}): {details}",
        advice="its log, under the stack's state folder, has the reason",
    )


def is_too_large(error: "grpc.RpcError") -> bool:
    """Whether gRPC refused the message for its size, which no later call changes."""
    return error.code().name == "RESOURCE_EXHAUSTED" and "larger than max" in str(error.details())


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
        raise usage_error(
            f"token={text!r} is not a freshness token; expected epoch:partition:offset",
            "take the token that `freshet record` prints, for example 9f2c51aa:3:1207",
        )
    return common_pb2.FreshnessToken(epoch=epoch, partition=int(partition), offset=int(offset))


def parse_context(pairs: Sequence[str]) -> dict[str, str]:
    """`["device=tv"]` -> `{"device": "tv"}`. Raises CommandError (usage) for a pair without `=`."""
    context: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise usage_error(f"context={pair!r} is not key=value", "for example --context device=tv")
        context[key] = value
    return context


def parse_time_ns(option: str, text: str) -> int:
    """Unix nanoseconds of an ISO 8601 moment (UTC unless it says otherwise) or of unix seconds, given as --option."""
    seconds = Decimal("nan")
    with suppress(ValueError):
        moment = datetime.fromisoformat(text)
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
        seconds = Decimal(since // timedelta(microseconds=1)) / 10**6
    with suppress(InvalidOperation):
        seconds = Decimal(text)
    if seconds.is_finite() and _FIRST_S <= seconds <= _LAST_S:
        return int(seconds * 10**9)
    advice = f"--{option} 2026-11-21T09:30:00Z; milliseconds are divided by 1000"
    raise usage_error(f"{option}={text!r} allowed: ISO 8601, or unix seconds of the years 1 to 9999", advice)


def split_ids(text: str) -> list[str]:
    """`"1193, 661"` -> `["1193", "661"]`."""
    return [part for part in (piece.strip() for piece in text.split(",")) if part]


def filter_of(
    allow_items: str,
    deny_items: str,
    allow_categories: str,
    deny_categories: str,
    where: Sequence[str],
    *,
    exclude_seen: bool = False,
) -> "common_pb2.Filter":
    """The filter that the options name, lists separated by commas. `where`: as `parse_condition`."""
    from freshet.v1 import common_pb2

    from services.contracts.attributes import condition_message
    from services.contracts.conditions import parse_condition

    return common_pb2.Filter(
        exclude_seen=exclude_seen,
        allow_item_ids=split_ids(allow_items),
        deny_item_ids=split_ids(deny_items),
        allow_categories=split_ids(allow_categories),
        deny_categories=split_ids(deny_categories),
        where=[condition_message(*_parsed(parse_condition, text)) for text in where],
    )


def put_attribute(item: "events_pb2.Item", name: str, value: object) -> None:
    """Write an attribute into an item: a number, an ISO date or time, or a string. Raises CommandError (usage)."""
    from services.contracts.attributes import set_value
    from services.contracts.conditions import parse_value

    if isinstance(value, bool) or not isinstance(value, int | float | str):
        allowed = "a number, a date as 2026-01-01, or a string"
        raise usage_error(f"attributes[{name!r}]={value!r:.80} allowed: {allowed}")
    # A whole number may be larger than a float can be.
    parsed = _parsed(parse_value, value) if isinstance(value, str) else float(str(value))
    set_value(item.attributes[name], parsed)


def _parsed(parse: Callable[[str], Response], text: str) -> Response:
    from services.platform.errors import InvalidRequest

    try:
        return parse(text)
    except InvalidRequest as error:
        raise usage_error(error.message) from error


def check_k(k: int, most: str = "1000") -> None:
    """Raises CommandError (usage) for what the wire cannot carry; processes check the rest."""
    if not 0 <= k < 2**32:
        raise usage_error(f"k={k} allowed: 1 to {most}", "--k 10")


def plain(message: "Message", *, without: Sequence[str] = ()) -> dict[str, Any]:
    """The message's fields by name, whole numbers as such, nested messages as dictionaries, for `--json`."""

    def value_of(value: Any) -> Any:
        return plain(value) if hasattr(value, "DESCRIPTOR") else value

    return {
        field.name: [value_of(one) for one in value] if field.is_repeated else value_of(value)
        for field in message.DESCRIPTOR.fields
        if field.name not in without
        for value in (getattr(message, field.name),)
    }


def read_titles(bundle: Path) -> dict[str, str]:
    """Item id -> title of every item that has one; empty when `bundle` cannot be read (titles are a courtesy)."""
    from services.algorithms.bundles.model_bundle import BundleError, load_bundle

    try:
        opened = load_bundle(bundle, verify=False)
        return {item_id: title for item_id, title in zip(opened.item_ids, opened.titles, strict=True) if title}
    except (BundleError, OSError):
        return {}
