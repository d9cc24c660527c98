"""The blocking client; several threads may use one object."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from freshet.v1 import gateway_pb2_grpc

from freshet_client import answers, calls, described
from freshet_client.channel import Endpoint, Tls
from freshet_client.errors import FreshetError, Unreachable, of_call
from freshet_client.requests import (
    Filter,
    HistoryEvent,
    Impression,
    Interaction,
    Item,
    NotAgain,
    RecommendOptions,
    Rule,
    SetChange,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from freshet_client.session import Session

T = TypeVar("T")

TIMEOUT_S = 5.0
# After a refused connection, gRPC fails every call until it reconnects half a second later. The retries of the service
# config end before that, so a call waits this long for a connection, within its deadline.
RECONNECT_S = 1.0


class GrpcTransport:
    """Calls methods at an endpoint; connects with the first call."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        tls = None if endpoint.tls is None else endpoint.tls.credentials()
        self._channel = (
            grpc.insecure_channel(endpoint.target, options=endpoint.options)
            if tls is None
            else grpc.secure_channel(endpoint.target, tls, options=endpoint.options)
        )
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Send the request and return the answer's message. Raises: FreshetError."""
        deadline = time.monotonic() + timeout_s
        try:
            return self._send(method, request, timeout_s, timeout_s)
        except Unreachable as error:
            if error.why != "nothing" or not self._connects(min(RECONNECT_S, deadline - time.monotonic())):
                raise
        return self._send(method, request, deadline - time.monotonic(), timeout_s)

    def _connects(self, within_s: float) -> bool:
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(within_s)
        except grpc.FutureTimeoutError:
            ready.cancel()
            return False
        return True

    def _send(self, method: str, request: Any, left_s: float, timeout_s: float) -> Any:
        endpoint = self._endpoint
        try:
            return getattr(self._stub, method)(request, timeout=left_s, metadata=endpoint.metadata)
        except grpc.RpcError as error:
            raise of_call(error, target=endpoint.target, timeout_s=timeout_s) from error
        except ValueError as error:
            # gRPC raises this for a closed channel.
            raise FreshetError(f"the client of {endpoint.target} is closed") from error

    def stream(self, method: str, request: Any) -> Generator[Any, None, None]:
        """Send the request and yield the messages of its answer. Raises: FreshetError."""
        target = self._endpoint.target
        try:
            call = getattr(self._stub, method)(request, metadata=self._endpoint.metadata)
        except ValueError as error:
            raise FreshetError(f"the client of {target} is closed") from error
        try:
            yield from call
        except grpc.RpcError as error:
            raise of_call(error, target=target) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


class Client:
    """A connection to one gateway, or to several of one installation.

    `target`: "host:port", an IPv6 address in brackets, or "dns:///name:port" for all addresses of a name. `tls`: None
    is plaintext. `timeout_s`: the default deadline. `is_background`: whether nobody waits for the answers; such calls
    get at most half of the capacity.

    Retriable calls are retried within the deadline. A failed method raises a FreshetError.
    Raises: InvalidArgument for a target, key or certificate that cannot be used.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = TIMEOUT_S,
        is_background: bool = False,
    ) -> None:
        self._transport: Any = GrpcTransport(Endpoint.of(target, api_key=api_key, tls=tls, is_background=is_background))
        self._timeout_s = timeout_s

    @classmethod
    def over(cls, transport: Any, timeout_s: float = TIMEOUT_S) -> Self:
        """A client over another transport, such as the one in `freshet_client.testing`."""
        made = cls.__new__(cls)
        made._transport, made._timeout_s = transport, timeout_s
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; calls in flight fail."""
        self._transport.close()

    def session(self, user_id: str = "", *, not_again: NotAgain | None = None) -> Session:
        """Start one user's visit, whose recommendations reflect its writes. An empty `user_id` is a visitor.

        `not_again`: items to leave out.
        """
        from freshet_client.session import Session

        return Session(self, user_id, not_again=not_again)

    def recommend(
        self, user_id: str = "", k: int = 10, *, timeout_s: float | None = None, **options: Unpack[RecommendOptions]
    ) -> answers.Recommendation:
        """The top k items (1-1,000) for a user or the `history` in RecommendOptions."""
        return self._run(calls.recommend(user_id, k, options), timeout_s)

    def search(
        self,
        query: str,
        k: int = 10,
        *,
        user_id: str = "",
        filter: Filter | None = None,
        context: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> answers.SearchAnswer:
        """The top k items for a query; `user_id` orders them for that user. `context`: as in `recommend`."""
        return self._run(calls.search(query, k, user_id, filter, context), timeout_s)

    def similar(
        self,
        item_id: str,
        k: int = 10,
        *,
        user_id: str = "",
        filter: Filter | None = None,
        context: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> answers.SimilarAnswer:
        """The top k items most like one item; `user_id` leaves out this user's seen items. `context`: as in
        `recommend`.
        """
        return self._run(calls.similar(item_id, k, user_id, filter, context), timeout_s)

    def explain(
        self,
        user_id: str,
        item_id: str,
        *,
        history: Sequence[HistoryEvent] = (),
        max_pairs: int = 0,
        rules: Sequence[Rule] = (),
        timeout_s: float | None = None,
    ) -> answers.Explanation:
        """Why an item has its score for a user. `max_pairs`: how many component pairs, largest first; 0 is all."""
        return self._run(calls.explain(user_id, item_id, history, max_pairs, rules), timeout_s)

    def record(self, *interactions: Interaction, timeout_s: float | None = None) -> list[answers.Receipt]:
        """Write interactions; return their receipts in order. With a receipt, an interaction is durable.

        Interactions that exceed one request are sent in several, one after the other; each has the full deadline. An
        error has the earlier receipts in `receipts`. Objects that are recorded again count once.
        """
        return self._run_all(calls.record(interactions), timeout_s)

    def record_impressions(
        self, user_id: str, exposure_id: str, impressions: Sequence[Impression], *, timeout_s: float | None = None
    ) -> list[answers.Receipt]:
        """Record which slots of an answer were seen; each counts once."""
        return self._run_all(calls.record_impressions(user_id, exposure_id, impressions), timeout_s)

    def undo(self, user_id: str, event_id: str, *, timeout_s: float | None = None) -> answers.Receipt:
        """Undo one event of a user; an unknown event id changes nothing."""
        return self._run(calls.undo(user_id, event_id), timeout_s)

    def put_items(self, items: Iterable[Item], *, fields: Sequence[str] = (), timeout_s: float | None = None) -> int:
        """Add, change, withdraw or restore items; returns the number written.

        `fields`: write only these fields, of known items: "title", "categories", "available", "withdrawn",
        "attributes", or "attributes.NAME" for one. If empty, items are replaced.
        """
        return sum(self._run(one, timeout_s) for one in calls.put_items(list(items), fields))

    def forget_user(
        self, user_id: str, *, preview: bool = False, timeout_s: float | None = None
    ) -> answers.ForgetReport:
        """Remove a user's history, states and contributions, exactly; `preview` only reports."""
        return self._run(calls.forget_user(user_id, preview), timeout_s)

    def freshness(self, *, timeout_s: float | None = None) -> answers.FreshnessReport:
        """How far each part has read."""
        return self._run(calls.freshness(), timeout_s)

    def catalogue(self, *, max_categories: int = 0, timeout_s: float | None = None) -> described.CatalogueDescription:
        """The catalogue's attributes, event types, and largest categories. `max_categories`: 0-10,000, 0 is 1,000."""
        return self._run(calls.catalogue(max_categories), timeout_s)

    def exposures(
        self, user_id: str, *, max_answers: int = 0, timeout_s: float | None = None
    ) -> described.ShownAnswers:
        """A user's newest answers (role support). `max_answers`: 1-100, 0 is 20."""
        return self._run(calls.exposures(user_id, max_answers), timeout_s)

    def exposure(self, user_id: str, exposure_id: str, *, timeout_s: float | None = None) -> described.ShownAnswer:
        """One answer of a user (role support)."""
        return self._run(calls.exposure(user_id, exposure_id), timeout_s)

    def health(self, *, minutes: int = 0, timeout_s: float | None = None) -> described.HealthReport:
        """The state of each part now, and in each of the newest `minutes` (0-1,440)."""
        return self._run(calls.health(minutes), timeout_s)

    def dead_letters(
        self, topic: str = "", *, max_letters: int = 0, timeout_s: float | None = None
    ) -> described.DeadLetterList:
        """The newest dead letters of a topic, "" for all (role operator). `max_letters`: 1-200 per topic, 0 is 50."""
        return self._run(calls.dead_letters(topic, max_letters), timeout_s)

    def replay_dead_letter(
        self, topic: str, position: answers.StreamPosition, *, preview: bool = False, timeout_s: float | None = None
    ) -> described.ReplayedLetter:
        """Write a dead letter's record again, once (role operator). `preview`: write nothing."""
        return self._run(calls.replay_dead_letter(topic, position, preview), timeout_s)

    def get_item(self, item_id: str, *, timeout_s: float | None = None) -> described.ItemReport:
        """An item's catalogue entry and its interactions since training. Raises: NotFound."""
        return self._run(calls.get_item(item_id), timeout_s)

    def list_items(
        self,
        prefix: str = "",
        *,
        category: str = "",
        newest_first: bool = False,
        page_size: int = 0,
        page_token: str = "",
        timeout_s: float | None = None,
    ) -> described.ItemPage:
        """A page of the catalogue: 1-1,000 items (0 is 50) whose id or title begins with `prefix`, of one category.

        The most popular items come first; with `newest_first`, new items do. A page may be short or empty: continue
        until `next_page_token` is empty.
        """
        return self._run(calls.list_items(prefix, category, newest_first, page_size, page_token), timeout_s)

    def user(
        self, user_id: str, *, max_events: int = 0, skip_events: int = 0, timeout_s: float | None = None
    ) -> described.UserReport:
        """What is stored of a user (role support): 1-1,000 events (0 is 100), newest first."""
        return self._run(calls.user(user_id, max_events, skip_events), timeout_s)

    def tail(self) -> Generator[described.TailedInteractions, None, None]:
        """Yield live samples of the stream: an empty one at once, then one in each second with new interactions.

        It needs the role operator or support; without support, user ids are pseudonyms. It ends after five minutes, or
        when the gateway stops; closing the generator ends it earlier. A gateway runs at most eight tails at a time,
        and at most four per key. Raises: FreshetError.
        """
        one = calls.tail()
        for message in self._transport.stream(one.method, one.request):
            yield one.read(message)

    def version_sets(self, *, timeout_s: float | None = None) -> described.VersionSets:
        """The gateway's models and what each answers (role operator)."""
        return self._run(calls.version_sets(), timeout_s)

    def change_version_set(
        self,
        change: SetChange,
        name: str = "",
        *,
        expected_revision: int,
        share: float = 0.0,
        timeout_s: float | None = None,
    ) -> described.Changed:
        """Take a step with a staged set (role operator); `roll_back` takes no name, `shadow` and `canary` a share.

        Raises: Conflict if `expected_revision` is not current, PreconditionFailed if another step must come first.
        """
        return self._run(calls.change_version_set(change, name, share, expected_revision), timeout_s)

    def rules(self, *, timeout_s: float | None = None) -> described.StandingRules:
        """The standing rules."""
        return self._run(calls.rules(), timeout_s)

    def put_rules(
        self, rules: Sequence[Rule], *, expected_revision: int, timeout_s: float | None = None
    ) -> described.Changed:
        """Replace all standing rules (role operator). Raises: Conflict if `expected_revision` is not current."""
        return self._run(calls.put_rules(rules, expected_revision), timeout_s)

    def call(self, method: str, request: Any, *, timeout_s: float | None = None) -> Any:
        """Call a method of GatewayService with its Protobuf request (`freshet.v1`)."""
        return self._transport.call(method, request, self._timeout_s if timeout_s is None else timeout_s)

    def _run(self, one: calls.Call[T], timeout_s: float | None) -> T:
        return one.read(self.call(one.method, one.request, timeout_s=timeout_s))

    def _run_all(
        self, parts: Iterable[calls.Call[list[answers.Receipt]]], timeout_s: float | None
    ) -> list[answers.Receipt]:
        receipts: list[answers.Receipt] = []
        try:
            for one in parts:
                acknowledged = self._run(one, timeout_s)
                receipts += acknowledged
        except FreshetError as error:
            error.receipts = tuple(receipts)
            raise
        return receipts
