"""Recommendations and events at fixed rates, and what is noted of every answer: enough to tell which model made it.

An open loop on asyncio in a process of its own. Beside each answer stand the two models' states of its user, read at
that moment: whoever has both can compute what each model would have said.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from freshet.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc

from loadtest.open_loop import NOT_SENT, OpenLoop, arrivals
from services.platform.rpc import client as rpc_client
from services.user_state.reader import StateReader

# Long: an answer is late on a busy machine, and none may fail.
TIMEOUT_S = 10.0
K = 10


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent where, to whom. models: versions whose states are noted. seconds: at most; a file `stop` ends it."""

    gateway: str
    redis: str
    users: list[str]
    items: list[str]
    models: list[str]
    recommends_per_s: float
    events_per_s: float
    seconds: float
    seed: int


@dataclass(kw_only=True)
class Answer:
    """A Recommend. at: Unix seconds when it was due. status: OK, gRPC's, or NOT_SENT. states: by model version the
    user's as (components, gate), hexadecimal, as of the event that the answer's was of."""

    at: float
    user: str
    status: str = "OK"
    ms: float = 0.0
    model: str = ""
    index: str = ""
    marks: list[int] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    absence_bucket: int = 0


class Traffic:
    """One run of a load."""

    def __init__(self, load: Load, stub: Any, reader: StateReader) -> None:
        self._load, self._stub, self._reader = load, stub, reader
        self.answers: list[Answer] = []
        # Their statuses, with details.
        self.events_failed: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stop: Path) -> None:
        """Until the time is up or `stop` exists."""
        load, rng = self._load, np.random.default_rng(self._load.seed)
        schedule = [
            (float(due), kind)
            for kind, rate in (("recommend", load.recommends_per_s), ("event", load.events_per_s))
            for due in arrivals("poisson", rate_per_s=rate, seconds=load.seconds, rng=rng)
        ]
        began = 0.0  # once the clock runs

        def start(due_s: float, kind: str) -> None:
            user = load.users[rng.integers(len(load.users))]
            made = (
                self._recommend(began + due_s, user)
                if kind == "recommend"
                else self._event(user, load.items[rng.integers(len(load.items))])
            )
            task = asyncio.get_running_loop().create_task(made)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def refuse(due_s: float, kind: str) -> None:
            if kind == "recommend":
                self.answers.append(Answer(at=began + due_s, user="", status=NOT_SENT))
            else:
                self.events_failed.append(NOT_SENT)

        clock = OpenLoop(
            schedule,
            start=start,
            refuse=refuse,
            in_flight=self._tasks,
            max_in_flight=500,
            report=lambda due_s, kind: None,
            report_every_s=60.0,
        )
        began = time.time()
        for wait_s in clock.waits():
            await asyncio.sleep(wait_s)
            if stop.exists():
                break
        await asyncio.gather(*self._tasks)

    async def _recommend(self, at: float, user: str) -> None:
        answer = Answer(at=at, user=user)
        try:
            said = await self._stub.Recommend(gateway_pb2.RecommendRequest(user_id=user, k=K), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            answer.status = exc.code().name
        else:
            answer.ms = (time.time() - at) * 1000
            answer.model, answer.index = said.model_version, said.index_version
            answer.marks, answer.absence_bucket = list(said.degradations), said.absence_bucket
            answer.items = [item.item_id for item in said.items]
            answer.scores = [item.score for item in said.items]
            made_of = (said.state_position.partition, said.state_position.offset)
            for model in self._load.models if said.HasField("state_position") else ():
                view = await self._reader.read_user(user, model, with_seen=False)
                # The state that answered, and not one of an event that came in between.
                if view.state is not None and (view.state.partition, view.state.offset) == made_of:
                    state = view.state.query_state
                    answer.states[model] = (state.components.hex(), state.gate.hex())
        self.answers.append(answer)

    async def _event(self, user: str, item: str) -> None:
        event = events_pb2.Interaction(user_id=user, item_id=item, type="click")
        request = gateway_pb2.RecordInteractionsRequest(interactions=[event])
        try:
            await self._stub.RecordInteractions(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            self.events_failed.append(f"{exc.code().name}: {exc.details()}")


async def _run(load: Load, folder: Path) -> None:
    reader = StateReader(load.redis, timeout_s=1.0)
    async with rpc_client.channel(load.gateway) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
        traffic = Traffic(load, stub, reader)
        await traffic.run(folder / "stop")
    await reader.close()
    found = {"events_failed": traffic.events_failed, "answers": [asdict(one) for one in traffic.answers]}
    (folder / "traffic.json").write_text(json.dumps(found))


def main() -> None:
    """Send what `load.json` in the folder of the command line says, into `traffic.json` there."""
    work = Path(sys.argv[1])
    asyncio.run(_run(Load(**json.loads((work / "load.json").read_text())), work))


# What runs it in a process of its own; the folder follows.
PROGRAM = (sys.executable, "-c", f"from {__name__} import main; main()")
