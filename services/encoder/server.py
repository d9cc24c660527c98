"""EncoderService over gRPC. The handlers use no Protobuf."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
from freshet.v1 import encoder_pb2, encoder_pb2_grpc

from services.contracts.processes import PROCESSES
from services.contracts.pseudonyms import PSEUDONYMS_BETWEEN, pseudonym_of
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.interactions import DEFAULT_TYPE
from services.contracts.wire import query_state_message
from services.encoder.domain import Vocabulary
from services.encoder.handlers.encode import EncodeHistory
from services.encoder.metrics import EncoderMetrics
from services.encoder.models import Model
from services.encoder.ports import UserReader
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.rpc.server import HealthState
from services.platform.stream.records import read_ms, write_up_to
from services.platform.validation import validate_id

SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name


class ServedModels:
    """Encodes on demand with each served model, and publishes the models' names in gRPC health."""

    def __init__(self, health: HealthState) -> None:
        self._health = health
        self.handlers: dict[str, EncodeHistory] = {}

    async def serve(self, models: Sequence[Model]) -> None:
        """Serve these models and no others."""
        versions = {one.vocabulary.model_version: one for one in models}
        for version in versions.keys() - self.handlers.keys():
            one = versions[version]
            self.handlers[version] = EncodeHistory(encoder=one.encoder, vocabulary=one.vocabulary)
        self._health.serve_as([PROCESSES["encoder"].health_of(version) for version in versions])
        for version in self.handlers.keys() - versions.keys():
            await self.handlers.pop(version).close()

    async def close(self) -> None:
        for handler in self.handlers.values():
            await handler.close()


@dataclass(kw_only=True, eq=False)
class DescribeUser:
    """Describes what is stored of a user, before and after the user is forgotten. Runs in an event loop.

    pseudonym_keys: the current key, then earlier keys. applied_up_to: partition -> last erased offset.
    """

    reader: UserReader
    vocabulary: Vocabulary
    pseudonym_keys: Sequence[bytes]
    applied_up_to: Callable[[str], Mapping[int, int]]

    async def __call__(self, user_id: str) -> encoder_pb2.DescribeUserResponse:
        """Describe a user. Raises: InvalidRequest; DependencyUnavailable if the state store does not answer."""
        validate_id("user_id", user_id)
        # The forgotten positions are read first, so that the stored data reflects them.
        forgotten = self.applied_up_to(user_id)
        stored = await self.reader.read_keys(user_id)
        response = encoder_pb2.DescribeUserResponse(
            user_pseudonym=PSEUDONYMS_BETWEEN.join(pseudonym_of(user_id, key) for key in self.pseudonym_keys),
            history_events=stored.history_events,
            seen_items=stored.seen_items,
            state_model_versions=stored.state_model_versions,
            in_model=user_id in self.vocabulary.user_index,
        )
        write_up_to(response.forgotten_up_to, forgotten)
        return response


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Translates messages and calls the handlers."""

    def __init__(
        self,
        handlers: Mapping[str, EncodeHistory],
        describe_user: DescribeUser,
        metrics: EncoderMetrics,
        model_version: str,
    ) -> None:
        """handlers: by model version, updated while serving. model_version: the process's own."""
        self._handlers = handlers
        self._describe_user = describe_user
        self._metrics = metrics
        self._model_version = model_version

    async def Encode(
        self, request: encoder_pb2.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> encoder_pb2.EncodeResponse:
        history = []
        for number, event in enumerate(request.history):
            if not event.HasField("event_time"):
                raise InvalidRequest.of(f"history[{number}].event_time", "absent", "a time; oldest event first")
            time_ms = read_ms(event.event_time, f"history[{number}].event_time")
            history.append(StoredEvent(time_ms, 0, 0, 0, event.item_id, event.type or DEFAULT_TYPE, event.value))
        handler = self._handlers.get(request.model_version or self._model_version)
        if handler is None:
            raise PreconditionFailed(
                f"encoder: it encodes for model {', '.join(self._handlers)}, not {request.model_version}"
            )
        encoded = await handler.encode(request.user_id, history)
        response = encoder_pb2.EncodeResponse(
            unknown_items=encoded.unknown_items,
            queue_ms=encoded.queue_seconds * 1000,
            encode_ms=encoded.encode_seconds * 1000,
        )
        if encoded.state is not None:
            self._metrics.encode_request.observe(encoded.encode_seconds)
            response.query_state.CopyFrom(query_state_message(encoded.state))
        return response

    async def DescribeUser(
        self, request: encoder_pb2.DescribeUserRequest, context: grpc.aio.ServicerContext
    ) -> encoder_pb2.DescribeUserResponse:
        return await self._describe_user(request.user_id)
