"""Recommendations at a fixed rate while replicas of a shard are killed and come back: what of it people see."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from freshet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from services.stack import Stack

RECOMMENDS_PER_S = 20.0
# A long deadline: what is late on a busy machine is not missing.
_HISTORY, _DEADLINE_S = 5, 10.0
_Stub: Any = gateway_pb2_grpc.GatewayServiceStub


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer: when it was asked for (monotonic seconds), and what it said of itself."""

    at: float
    status: str
    marks: tuple[str, ...] = ()
    is_estimate: bool = False
    share: float = 1.0


async def watched(stack: Stack, items: Sequence[str], *, phase_s: float, seed: int) -> list[dict[str, Any]]:
    """Rows: quiet, one replica of shard 1 killed, both, one back."""
    replicas = [one for name, one in stack.shard_stacks() if name.startswith("1-of-")]
    seen: list[Seen] = []
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    async with grpc.aio.insecure_channel(stack.address("gateway")) as channel:
        stub = _Stub(channel)

        async def ask() -> None:
            request = gateway_pb2.RecommendRequest(k=10)
            for item_id in rng.choice(items, _HISTORY, replace=False).tolist():
                request.history.add(item_id=item_id)
            at = time.monotonic()
            try:
                answer = await stub.Recommend(request, timeout=_DEADLINE_S)
            except grpc.aio.AioRpcError as exc:
                seen.append(Seen(at, exc.code().name))
                return
            marks = tuple(gateway_pb2.Degradation.Name(one) for one in answer.degradations)
            is_estimate = answer.certificate.kind == common_pb2.Certificate.KIND_ESTIMATE
            seen.append(Seen(at, "OK", marks, is_estimate, answer.searched_share))

        async def asking(until: Callable[[], bool]) -> None:
            asks = []
            while not until():
                asks.append(asyncio.ensure_future(ask()))
                await asyncio.sleep(1 / RECOMMENDS_PER_S)
            await asyncio.gather(*asks)

        async def phase(name: str, event: Callable[[], None] | None = None, *, returns: bool = False) -> None:
            began = time.monotonic()
            if event is not None:
                await asking(lambda: time.monotonic() > began + 1)
                await asyncio.to_thread(event)
            await asking(lambda: time.monotonic() > began + phase_s)
            rows.append(_row(name, [one for one in seen if one.at >= began], began if returns else None))

        await phase("all replicas")
        await phase("one of two replicas killed", lambda: replicas[0].kill("candidates"))
        await phase("both killed", lambda: replicas[1].kill("candidates"))
        starting = asyncio.ensure_future(asyncio.to_thread(replicas[0].start, "candidates"))
        await asking(starting.done)
        await phase("one back, from when it is ready", returns=True)
    await asyncio.to_thread(replicas[1].start, "candidates")
    return rows


def _row(phase: str, mine: Sequence[Seen], ready: float | None) -> dict[str, Any]:
    marked = [one for one in mine if one.marks]
    return {
        "phase": phase,
        "answers": len(mine),
        "failed": sum(one.status != "OK" for one in mine),
        "marked": len(marked),
        "estimates": sum(one.is_estimate for one in mine),
        "marks": " ".join(sorted({mark.removeprefix("DEGRADATION_") for one in marked for mark in one.marks})) or None,
        "share": min((one.share for one in mine), default=1.0),
        "last_marked_s": None if ready is None else max((one.at - ready for one in marked), default=0.0),
    }
