"""The replay process: an outside client that sends events and requests recommendations on a clock.

The demo runs `python -m services.offline.demo.replay PLAN RESULT`. It shares the machine with the measured stack, so
requests are built in advance, one event loop makes the calls, one thread sends to Kafka, and nothing is evaluated here.
The schedule is an open loop: an action starts when it is due. Only if a prediction is late, its event and the user's
later events wait for it, because a prediction must precede its event.

One JSON line per second on stdout reports progress.
"""

import asyncio
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import grpc
import grpc.aio
from freshet.v1 import common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc

from loadtest.open_loop import NOT_SENT, OpenLoop
from services.offline.demo.outside_producer import OnAcknowledged, OutsideProducer
from services.offline.demo.plan import Prediction, ReplayEvent, ReplayPlan, ReplayResult, read, write
from services.platform.config import environment_kafka, environment_tls
from services.platform.rpc import client as rpc_client

_BROKEN_VALUE = b"\x0a\x7ftruncated"
_RESEND_AFTER_EVENTS = 400
_PROGRESS_EVERY_S = 1.0
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_STAGES = ("queue", "encode", "first_stage", "transport", "total")

Action = tuple[Literal["ask", "ask_with_token", "send"], int]


class Replay:
    """Runs a plan once."""

    def __init__(self, plan: ReplayPlan, stub: Any, make_producer: Callable[[OnAcknowledged], OutsideProducer]) -> None:
        self._plan = plan
        self._events = plan.events
        self._stub = stub
        self._loop = asyncio.get_running_loop()
        self._values = [interaction_bytes(event) for event in plan.events]
        self._requests = [self._request(event) if event.predicted else None for event in plan.events]
        self._followed = {
            event.event_id: event
            for position, event in enumerate(plan.events)
            if event.known and position % plan.freshness_every == plan.freshness_every // 2
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[int, list[asyncio.Task[None]]] = {}
        self._delayed: dict[str, asyncio.Task[None]] = {}
        self.result = ReplayResult()
        self.producer = make_producer(self._acknowledged_in_thread)
        self._clock = OpenLoop(
            timeline(plan),
            start=self._begin,
            refuse=self._refuse,
            in_flight=self._tasks,
            max_in_flight=plan.max_in_flight,
            report=self._report_progress,
            report_every_s=_PROGRESS_EVERY_S,
        )

    async def run(self) -> ReplayResult:
        """Warm up, replay, and wait for all acknowledgements and `_follow` tasks."""
        await self._warm_up()
        gc.collect()
        gc.freeze()
        gc.disable()
        cpu_started = time.process_time()
        for wait_s in self._clock.waits():
            await asyncio.sleep(wait_s)
        self.result.seconds = self._clock.now_s()
        self.result.cpu_seconds = time.process_time() - cpu_started
        gc.enable()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.to_thread(self._finish_sending)
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self.result.acknowledged = {key: list(position) for key, position in self.producer.positions.items()}
        self.result.last_offsets = dict(self.producer.last_offsets)
        self.result.acknowledge_ms = list(self.producer.acknowledge_ms)
        self.result.send_errors = dict(self.producer.errors)
        self.result.unacknowledged = [
            event.event_id for event in self._events if event.event_id not in self.producer.positions
        ]
        return self.result

    def _begin(self, due_s: float, action: Action) -> None:
        kind, position = action
        if kind == "send":
            self._send_due(position)
        else:
            task = self._start(self._predict(position, due_s, with_token=kind == "ask_with_token"))
            self._asked.setdefault(position, []).append(task)

    def _refuse(self, due_s: float, action: Action) -> None:
        """Handle an action when too many calls are open: an event is still sent, but a prediction counts as a miss."""
        kind, position = action
        if kind == "send":
            self._send_due(position)
        else:
            self._predictions(kind == "ask_with_token").append(
                Prediction(position=position, latency_ms=self._clock.latency_ms(due_s), error=NOT_SENT)
            )

    def _send_due(self, position: int) -> None:
        """Send an event after its predictions and the user's delayed events."""
        event = self._events[position]
        open_tasks = [task for task in self._asked.pop(position, []) if not task.done()]
        waiting = self._delayed.get(event.user_id)
        if waiting is not None and not waiting.done():
            open_tasks.append(waiting)
        if open_tasks:
            self.result.late_sends += 1
            self._delayed[event.user_id] = self._start(self._send_after(open_tasks, position))
        else:
            self._send(position)

    async def _send_after(self, tasks: list[asyncio.Task[None]], position: int) -> None:
        await asyncio.wait(tasks)
        self._send(position)

    def _send(self, position: int) -> None:
        event = self._events[position]
        self.producer.send(event.event_id, event.user_id.encode(), self._values[position])
        number = position + 1
        if number % self._plan.duplicate_every == 0 and position >= _RESEND_AFTER_EVENTS:
            earlier = self._events[position - _RESEND_AFTER_EVENTS]
            if earlier.event_id in self.producer.positions:
                value = self._values[position - _RESEND_AFTER_EVENTS]
                self.producer.send(earlier.event_id, earlier.user_id.encode(), value)
                self.result.duplicates_sent += 1
        if number % self._plan.malformed_every == 0:
            broken_id = f"{self._plan.malformed_prefix}-{number}"
            self.producer.send(broken_id, event.user_id.encode(), _BROKEN_VALUE, [("event-id", broken_id.encode())])
            self.result.malformed_sent += 1

    def _finish_sending(self) -> None:
        """Send failed events again with the same event ids, so that each counts once."""
        for _ in range(3):
            self.producer.wait(20)
            missing = [position for position, e in enumerate(self._events) if e.event_id not in self.producer.positions]
            if not missing:
                break
            for position in missing:
                self.producer.send(
                    self._events[position].event_id, self._events[position].user_id.encode(), self._values[position]
                )
        self.producer.close()

    def _predictions(self, with_token: bool) -> list[Prediction]:
        return self.result.predictions_with_token if with_token else self.result.predictions

    async def _predict(self, position: int, due_s: float, *, with_token: bool) -> None:
        request = self._requests[position]
        assert request is not None
        previous = self._events[position].previous
        if with_token and previous >= 0:
            source = self.producer.positions.get(self._events[previous].event_id)
            if source is not None:
                request = gateway_pb2.RecommendRequest.FromString(request.SerializeToString())
                request.freshness_token.CopyFrom(
                    common_pb2.FreshnessToken(epoch=self._plan.epoch, partition=source[0], offset=source[1])
                )
        try:
            answer = await self._stub.Recommend(request, timeout=self._plan.timeout_ms / 1000)
            found = prediction(position, self._clock.latency_ms(due_s), answer)
        except grpc.aio.AioRpcError as error:
            found = Prediction(position=position, latency_ms=self._clock.latency_ms(due_s), error=error.code().name)
        self._predictions(with_token).append(found)

    def _acknowledged_in_thread(self, event_id: str, partition: int, offset: int, acknowledged: float) -> None:
        event = self._followed.get(event_id)
        if event is not None:
            self._loop.call_soon_threadsafe(lambda: self._start(self._follow(event, partition, offset, acknowledged)))

    async def _follow(self, event: ReplayEvent, partition: int, offset: int, acknowledged: float) -> None:
        """From the event's acknowledgement on, request recommendations until an answer's state reflects the event."""
        request = gateway_pb2.RecommendRequest(user_id=event.user_id, k=1)
        request.filter.exclude_seen = False
        while (waited_ms := (time.monotonic() - acknowledged) * 1000) < self._plan.freshness_timeout_ms:
            await asyncio.sleep(self._plan.freshness_poll_ms / 1000)
            self.result.freshness_polls += 1
            try:
                answer = await self._stub.Recommend(request, timeout=self._plan.timeout_ms / 1000)
            except grpc.aio.AioRpcError:
                continue
            position = answer.state_position
            if answer.HasField("state_position") and position.partition == partition and position.offset >= offset:
                waited_ms = (time.monotonic() - acknowledged) * 1000
                self.result.freshness_ms.append(waited_ms)
                return
        self.result.unreflected += 1

    async def _warm_up(self) -> None:
        """Make unmeasured requests for the replay's own users; the first may wait for a connection."""
        requests = [request for request in self._requests if request is not None]
        for request in itertools.islice(itertools.cycle(requests), self._plan.warm_up_calls if requests else 0):
            try:
                await self._stub.Recommend(request, timeout=5, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSED:
                    raise RuntimeError(f"the gateway refuses the demo: {error.details()}") from error
                print_line({"warm_up_error": f"{error.code().name}: {error.details()}"})
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.01)

    def _request(self, event: ReplayEvent) -> gateway_pb2.RecommendRequest:
        request = gateway_pb2.RecommendRequest(user_id=event.user_id, k=self._plan.k)
        request.filter.exclude_seen = True
        # `as_of` is the event's time, as in a real request just before the event.
        request.as_of.FromSeconds(event.time_s)
        return request

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report_progress(self, _: float, action: Action) -> None:
        answers = self.result.predictions[-200:]
        hits = sum(self._events[answer.position].item_id in answer.item_ids for answer in answers)
        latencies = sorted(answer.latency_ms for answer in answers)
        freshness = sorted(self.result.freshness_ms[-20:])
        print_line(
            {
                "sent": action[1] + 1,
                "acknowledged": len(self.producer.positions),
                "recent_hit_rate": round(hits / len(answers), 4) if answers else None,
                "recent_p50_ms": round(latencies[len(latencies) // 2], 1) if latencies else None,
                "recent_freshness_ms": round(freshness[len(freshness) // 2], 1) if freshness else None,
            }
        )


def timeline(plan: ReplayPlan) -> list[tuple[float, Action]]:
    """Return (due seconds, (action, event position)); a prediction is due `lead_ms` before its event.

    The second request, with the token, is due half the mean interval between predictions later, at most `lead_ms` / 2,
    so that the two requests are not a burst.
    """
    lead_s = plan.lead_ms / 1000
    predicted = sum(event.predicted for event in plan.events)
    apart_s = min(lead_s / 2, 0.5 * len(plan.events) / plan.rate_per_s / max(1, predicted))
    actions: list[tuple[float, Action]] = []
    for position, event in enumerate(plan.events):
        begin_s = position / plan.rate_per_s
        if event.predicted:
            actions += [(begin_s, ("ask", position)), (begin_s + apart_s, ("ask_with_token", position))]
        actions.append((lead_s + begin_s, ("send", position)))
    return actions


def interaction_bytes(event: ReplayEvent) -> bytes:
    """Return the record's value, a Protobuf `Interaction`."""
    interaction = events_pb2.Interaction(
        event_id=event.event_id, user_id=event.user_id, item_id=event.item_id, type=event.type, value=event.value
    )
    interaction.event_time.FromSeconds(event.time_s)
    return bytes(interaction.SerializeToString())


def prediction(position: int, latency_ms: float, answer: gateway_pb2.RecommendResponse) -> Prediction:
    """Return the fields of an answer that the summary needs."""
    times = answer.stage_times
    return Prediction(
        position=position,
        item_ids=[scored.item_id for scored in answer.items],
        latency_ms=latency_ms,
        stages_ms={name: getattr(times, f"{name}_ms") for name in _STAGES},
        state_source=answer.state_source,
        degradations=[gateway_pb2.Degradation.Name(value) for value in answer.degradations],
        certificate=common_pb2.Certificate.Kind.Name(answer.certificate.kind),
        token_honoured=answer.token_honoured,
    )


def print_line(value: dict[str, Any]) -> None:
    """Print one JSON object on one line for the parent process."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def with_key(channel: grpc.aio.Channel) -> Any:
    """Return the gateway's Recommend with the API key of FRESHET_API_KEY, if set."""
    stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
    return SimpleNamespace(Recommend=partial(stub.Recommend, metadata=rpc_client.api_key_metadata()))


async def replay(plan_path: Path, result_path: Path) -> None:
    """Read the plan, run it, write the result."""
    plan = read(ReplayPlan, plan_path)
    kafka = environment_kafka(plan.bootstrap)

    def make_producer(on_acknowledged: OnAcknowledged) -> OutsideProducer:
        return OutsideProducer(bootstrap=kafka, topic=plan.topic, on_acknowledged=on_acknowledged)

    async with rpc_client.channel(plan.gateway, tls=environment_tls()) as channel:
        result = await Replay(plan, with_key(channel), make_producer).run()
    write(result, result_path)


def main() -> None:
    """Run `python -m services.offline.demo.replay PLAN RESULT`."""
    sys.setswitchinterval(0.001)  # the sender must not block the event loop for 5 ms at a time
    asyncio.run(replay(Path(sys.argv[1]), Path(sys.argv[2])))


if __name__ == "__main__":
    main()
