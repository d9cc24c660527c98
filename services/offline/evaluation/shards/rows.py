"""`freshet bench shards`: candidates in shards beside one process of the same catalogue, on one machine.

Every answer is compared in every bit with the one process's while items change; then bounds and recall of algorithms
that leave something out; then replicas are killed under load.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import load_bundle
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.large.catalogue import queries
from services.offline.evaluation.shards.compare import (
    Promises,
    changing,
    compare,
    connected,
    cpu_seconds,
    promises,
    resident_mb,
    states_of,
)
from services.offline.evaluation.shards.outages import RECOMMENDS_PER_S, watched
from services.stack import Ports, Stack
from services.stack.launcher import up_together
from services.stack.ports import owner

POOL_SIZE = 200
_STATES = 2_000
_ALGORITHMS = "FRESHET_CANDIDATES_ALGORITHMS"


def run(request: Request, *, bundle: Path, shards: int, replicas: int, searches: int) -> Report:
    """Measure; writes shards.{md,json}."""
    began = time.perf_counter()
    held = load_bundle(bundle)
    states = states_of(held, queries(held, _STATES, seed=request.seed))
    few = max(1, searches // 200)
    with tempfile.TemporaryDirectory(prefix="freshet-shards-") as name:
        stack = Stack(Path(name) / "state", bundle=bundle, ports=Ports.free(), shards=shards, replicas=replicas)
        whole = _alone(stack, Path(name) / "whole")
        started = [whole]
        try:
            request.say("starting the stack")
            stack.up()
            parts = [one for _, one in stack.shard_stacks()]
            up_together([*parts, whole], ["candidates"], timeout_s=300.0)
            cpu = [cpu_seconds([whole]), cpu_seconds(parts)]

            async def exact() -> Any:
                async with connected(stack, whole) as (sharded, alone):
                    with changing(stack, held, request.seed):
                        return await compare(
                            sharded, alone, held, states, searches=searches, seed=request.seed, say=request.say
                        )

            found = asyncio.run(exact())
            cpu = [cpu_seconds([whole]) - cpu[0], cpu_seconds(parts) - cpu[1]]
            memory = [resident_mb([whole]), resident_mb(parts)]
            request.say("killing replicas under load")
            outages = asyncio.run(
                watched(stack, held.item_ids, phase_s=4.0 if request.quick else 15.0, seed=request.seed)
            )
            # Changes went on in the topic: the one that says what is true follows them, too.
            truth = _alone(stack, Path(name) / "truth", {_ALGORITHMS: "exact"})
            started.append(truth)
            truth.up(["candidates"], timeout_s=300.0)
            proven: list[Promises] = []
            for algorithm in algorithms_of(held.num_items, held.pair_gate is not None):
                request.say(f"promises of {algorithm}")
                for one in (*parts, whole):
                    one.stop("candidates")
                    one.use_settings({**one.place.settings, _ALGORITHMS: algorithm})
                up_together([*parts, whole], ["candidates"], timeout_s=300.0)

                async def pools(algorithm: str = algorithm) -> Promises:
                    async with connected(stack, whole) as (sharded, alone), connected(stack, truth) as (_, exactly):
                        return await promises(
                            sharded, alone, exactly, held, states,
                            algorithm=algorithm, searches=few, pool_size=POOL_SIZE, seed=request.seed,
                        )  # fmt: skip

                proven.append(asyncio.run(pools()))
        finally:
            for one in (*started, *(one for _, one in stack.shard_stacks())):
                one.down()
            stack.down()
        report = report_of("shards", request, outages, began)
        report |= {
            "items": held.num_items,
            "shards": shards,
            "replicas": replicas,
            "compared": found.compared,
            "different": found.different,
            "examples": found.examples[:5],
            "versions": len(found.versions),
            "asked_again": found.not_of_one_version,
            "costs": [
                _cost("one process", found.whole_ms, cpu[0], memory[0]),
                _cost(f"{shards} shards, {replicas} replicas each", found.sharded_ms, cpu[1], memory[1]),
            ],
            "promises": [asdict(one) for one in proven],
            "pool_size": POOL_SIZE,
            "recommends_per_s": RECOMMENDS_PER_S,
        }
    return written(request, report, page)


def page(report: Report) -> str:
    """shards.md of a report; a `remark` is what a person adds to it."""
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report})


def algorithms_of(num_items: int, is_mixture: bool) -> list[str]:
    """Those that leave something out, with a tenth of the items where they look at many."""
    tenth = max(POOL_SIZE, num_items // 10)
    if not is_mixture:
        return [f"quantized({tenth})"]
    return [f"top_k_avg({tenth})", f"combined_top_k({tenth // 8},{tenth})", f"quantized_tangents({tenth})"]


def _alone(stack: Stack, state: Path, settings: Mapping[str, str] | None = None) -> Stack:
    """One process of candidates with all items beside the stack, unstarted."""
    numbers = {port: number for port, number in Ports.free().numbers.items() if owner(port) == "candidates"}
    ports = Ports({**stack.ports.numbers, **numbers})
    return Stack(state, bundle=stack.bundle, ports=ports, profile="split", settings=settings)


def _cost(what: str, times: list[float], cpu: float, memory: float) -> dict[str, Any]:
    return {
        "what": what,
        "p50_ms": float(np.median(times)),
        "p99_ms": float(np.percentile(times, 99)),
        "cpu_ms": 1000 * cpu / max(1, len(times)),
        "memory_mb": memory,
    }
