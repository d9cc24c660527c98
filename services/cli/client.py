"""Makes blocking calls to processes, turns their errors into sentences, and parses option values.

gRPC is imported only when a call is made.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.cli.output import CommandError, ExitStatus, if_option, sentences, usage_error

if TYPE_CHECKING:
    from freshet.v1 import common_pb2, events_pb2, gateway_pb2
    from freshet_client import Client, FreshetError
    from google.protobuf.message import Message

    from services.stack import Stack

Given = TypeVar("Given")
Response = TypeVar("Response")

# The years 1 to 9999, the range of a protobuf Timestamp.
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799


@contextmanager
def gateway(target: str, *, is_background: bool = False) -> "Iterator[Client]":
    """Yield a client of the gateway at `target` ("host:port"), with the API key of FRESHET_API_KEY.

    Failures in the block become a `CommandError` with advice.
    """
    from freshet_client import FreshetError

    from services.platform.rpc.client import gateway_client

    try:
        with sentences():
            client = gateway_client(target, is_background=is_background)
        with client:
            yield client
    except FreshetError as error:
        raise explain(error) from error


def ask(target: str, method: str, request: "Message", timeout_ms: int, *, field: str = "") -> Any:
    """Return the answer of the gateway at `target`, or one `field` of it, as a plain value of freshet_client.

    Raises: CommandError with advice.
    """
    return timed(target, method, request, timeout_ms, field=field)[0]


def timed(target: str, method: str, request: "Message", timeout_ms: int, *, field: str = "") -> tuple[Any, float]:
    """Return the answer of `ask` and the milliseconds of connecting and calling."""
    from freshet_client.calls import Call

    with gateway(target) as client:
        started = time.perf_counter()
        found = client.call(method, request, timeout_s=timeout_ms / 1000)
        elapsed_ms = round((time.perf_counter() - started) * 1000, 3)
        return Call(method, request, field).read(found), elapsed_ms


def stack_of(state: Path, **options: Any) -> "Stack":
    """Return the local stack of a state folder, with further parameters of `Stack`."""
    from services.stack import Stack

    return Stack(state, **options)


@contextmanager
def process(name: str, target: str) -> Iterator[Any]:
    """Yield a stub of the process `name` ("candidates", "refresher", ...) at `target` ("host:port")."""
    from services.platform.config import environment_tls
    from services.platform.rpc.client import blocking_channel

    stub = getattr(import_module(f"freshet.v1.{name}_pb2_grpc"), f"{name.title()}ServiceStub")
    with sentences():
        channel = blocking_channel(target, environment_tls())
    with channel:
        yield stub(channel)


def call(
    method: Callable[..., Response], request: Any, *, target: str, timeout_s: float, process: str = "gateway"
) -> Response:
    """Call `method(request)` of a process. Calls to the gateway carry the API key of FRESHET_API_KEY, if set.

    Raises: CommandError with advice for a failed status.
    """
    import grpc
    from freshet_client.errors import of_call

    from services.platform.rpc.client import api_key_metadata

    metadata = api_key_metadata() if process == "gateway" else ()
    shown: dict[str, Any] = {"metadata": metadata} if metadata else {}
    try:
        return method(request, timeout=timeout_s, **shown)
    except grpc.RpcError as error:
        raise explain(of_call(error, target=target, timeout_s=timeout_s), process) from error


def explain(error: "FreshetError", process: str = "gateway") -> CommandError:
    """Return a sentence, the next step and the exit status for a failed call of a process."""
    import freshet_client as of

    message, at = error.message, f"the {process} at {error.target}"
    address = if_option(process, f"; --{process} names another address")
    wait = if_option("timeout_ms", "; --timeout-ms waits longer")
    match error:
        case of.TooLarge():
            return usage_error(message, "ask for less at a time")
        case of.InvalidArgument() | of.NotFound() | of.Unsupported():
            return usage_error(message, "see --help for an example")
        case of.PreconditionFailed():
            return CommandError(message, advice="`freshet doctor` says what has to be done first")
        case of.Unauthenticated() | of.PermissionDenied():
            return CommandError(message, advice="FRESHET_API_KEY holds the key to use; `freshet keys create` makes one")
        case of.Unreachable(why="HTTP/1.1"):
            return usage_error(message, if_option(process, f"--{process} names another address"))
        case of.Unreachable(why="TLS"):
            advice = "FRESHET_TLS_CERT, FRESHET_TLS_KEY and FRESHET_TLS_CA name what `freshet certs` made"
        case of.Unreachable():
            message = f"{message.partition(': ')[0]}: the {process} process is not running there"
            advice = f"`freshet up` starts it, `freshet status` shows what runs{address}"
        case of.Unavailable():
            message = f"{at} cannot do this now: {message}"
            advice = "`freshet status` shows which part is down; the same command is safe to repeat"
        case of.DeadlineExceeded():
            advice = f"`freshet status` shows whether every part is healthy{wait}"
        case of.Overloaded():
            message, advice = f"{at} refused early, it has too much to do: {message}", "repeat the command in a moment"
        case _:
            advice = "its log, under the stack's state folder, has the reason"
            return CommandError(f"{at} failed ({error.status}): {message}", advice=advice)
    return CommandError(message, advice=advice, status=ExitStatus.UNAVAILABLE)


def parse_token(text: str) -> "common_pb2.FreshnessToken":
    """Read `epoch:partition:offset`. Raises: CommandError (usage)."""
    from freshet.v1 import common_pb2
    from freshet_client import FreshnessToken, InvalidArgument

    try:
        token = FreshnessToken.parse(text)
    except InvalidArgument as error:
        advice = "take the token that `freshet record` prints, for example 9f2c51aa:3:1207"
        raise usage_error(error.message, advice) from error
    return common_pb2.FreshnessToken(epoch=token.epoch, partition=token.partition, offset=token.offset)


def history_of(item_ids: Sequence[str]) -> "list[gateway_pb2.HistoryEvent]":
    """Return the items, oldest first, as a history that ends now, with one minute between neighbours."""
    from freshet.v1 import gateway_pb2

    oldest_s = int(time.time()) - 60 * (len(item_ids) - 1)
    events = [gateway_pb2.HistoryEvent(item_id=item_id) for item_id in item_ids]
    for number, event in enumerate(events):
        event.event_time.FromSeconds(oldest_s + 60 * number)
    return events


def rules_of(path: Path | None) -> "list[common_pb2.Rule]":
    """Return the rules of a YAML file. Raises: CommandError naming file, rule and key."""
    from services.contracts.yaml_files import read_rules

    return [] if path is None else parsed(read_rules, path)


def parse_context(pairs: Sequence[str]) -> dict[str, str]:
    """`["device=tv"]` -> `{"device": "tv"}`. Raises: CommandError (usage) for a pair without `=`."""
    context: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise usage_error(f"context={pair!r} is not key=value", "for example --context device=tv")
        context[key] = value
    return context


def parse_time_ns(option: str, text: str) -> int:
    """Return unix nanoseconds of an ISO 8601 time (UTC by default) or of unix seconds. Errors name `--option`."""
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


def put_attribute(item: "events_pb2.Item", name: str, value: object) -> None:
    """Write an attribute into an item: a number, an ISO date or time, or a string. Raises: CommandError (usage)."""
    from services.contracts.attributes import parse_value, set_value

    if isinstance(value, bool) or not isinstance(value, int | float | str):
        allowed = "a number, a date as 2026-01-01, or a string"
        raise usage_error(f"attributes[{name!r}]={value!r:.80} allowed: {allowed}")
    # Converted through text, because float() raises OverflowError for a too large int but returns inf for its text.
    read = parsed(parse_value, value) if isinstance(value, str) else float(str(value))
    set_value(item.attributes[name], read)


def parsed(parse: Callable[[Given], Response], given: Given) -> Response:
    """Return `parse(given)`. Raises: CommandError (usage) if `parse` rejects the value."""
    from services.platform.errors import InvalidRequest

    try:
        return parse(given)
    except InvalidRequest as error:
        raise usage_error(error.message) from error


def check_k(k: int, most: str = "1000") -> None:
    """Refuse values outside the request's uint32; the called process checks the limits. Raises: CommandError
    (usage).
    """
    if not 0 <= k < 2**32:
        raise usage_error(f"k={k} allowed: 1 to {most}", "--k 10")


def model_version(bundle: Path) -> str:
    """Return the version of a bundle's model. Raises: BundleError."""
    from services.algorithms.bundles.model_bundle import load_bundle

    return load_bundle(bundle, verify=False).model_version


def read_titles(bundle: Path) -> dict[str, str]:
    """Return item id -> title, for items with one; empty if `bundle` cannot be read."""
    from services.algorithms.bundles.model_bundle import BundleError, load_bundle

    try:
        opened = load_bundle(bundle, verify=False)
        return {item_id: title for item_id, title in zip(opened.item_ids, opened.titles, strict=True) if title}
    except (BundleError, OSError):
        return {}
