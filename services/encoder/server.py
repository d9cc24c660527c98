"""EncoderService over gRPC. Protobuf stops here."""

from collections.abc import Mapping, Sequence

import grpc
from freshet.v1 import encoder_pb2, encoder_pb2_grpc

from services.contracts.processes import PROCESSES
from services.contracts.stored_history import StoredEvent
from services.contracts.topics.interactions import DEFAULT_TYPE
from services.contracts.wire import query_state_message
from services.encoder.handlers.encode import EncodeHistory
from services.encoder.handlers.forget_users import DescribeUser
from services.encoder.metrics import EncoderMetrics
from services.encoder.models import Model
from services.platform.errors import InvalidRequest, PreconditionFailed
from services.platform.rpc.server import HealthState
from services.platform.stream.records import read_ms, write_up_to

SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name


class ServedModels:
    """On-demand encoding by model version."""

    def __init__(self, own: Model, health: HealthState) -> None:
        self._health, self._own_version = health, own.vocabulary.model_version
        self.handlers: dict[str, EncodeHistory] = {}
        self._add(own)

    async def take(self, others: tuple[Model, ...]) -> None:
        versions = {one.vocabulary.model_version: one for one in others}
        for version in versions.keys() - self.handlers.keys():
            self._add(versions[version])
        self._report_health([self._own_version, *versions])
        for version in self.handlers.keys() - versions.keys() - {self._own_version}:
            await self.handlers.pop(version).close()

    async def close(self) -> None:
        for handler in self.handlers.values():
            await handler.close()

    def _add(self, model: Model) -> None:
        handler = EncodeHistory(encoder=model.encoder, vocabulary=model.vocabulary)
        self.handlers[model.vocabulary.model_version] = handler
        self._report_health(list(self.handlers))

    def _report_health(self, versions: Sequence[str]) -> None:
        self._health.serve_as([PROCESSES["encoder"].health_of(version) for version in versions])


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
        found = await self._describe_user(request.user_id)
        response = encoder_pb2.DescribeUserResponse(
            user_pseudonym=found.pseudonym,
            history_events=found.stored.history_events,
            seen_items=found.stored.seen_items,
            state_model_versions=found.stored.state_model_versions,
            in_model=found.in_model,
        )
        write_up_to(response.forgotten_up_to, found.forgotten_up_to)
        return response
