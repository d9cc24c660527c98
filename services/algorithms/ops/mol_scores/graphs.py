"""CUDA graphs of searches: a small batch has about forty launches, which a graph replays as one.

The second call with a key is captured, so single calls cost no capture. The least recently used graphs are evicted. A
replay writes into the graph's tensors, so callers must hold a lock.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from services.algorithms.ops.mol_scores.device import DeviceQueries

Output = TypeVar("Output")
_MAX_QUERIES = 64  # for larger batches, kernels take longer than their launches


@dataclass(frozen=True, slots=True)
class _Captured(Generic[Output]):
    graph: "torch.cuda.CUDAGraph"
    queries: DeviceQueries
    output: Output


class CapturedCalls(Generic[Output]):
    def __init__(self, *, max_graphs: int) -> None:
        """Capture functions of B queries per key.

        max_graphs: limit of graphs, each of which owns the intermediate tensors of its call; 0: never capture.
        """
        self._max_graphs = max_graphs
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._graphs: OrderedDict[Hashable, _Captured[Output]] = OrderedDict()

    def __call__(self, key: Hashable, queries: DeviceQueries, function: Callable[[DeviceQueries], Output]) -> Output:
        """`function(queries)`, whose tensors are valid until the next call."""
        suits = queries.components.device.type == "cuda" and 0 < len(queries) <= _MAX_QUERIES
        if not suits or not self._max_graphs:
            return function(queries)
        key = (key, len(queries), queries.fused, queries.half_fits)
        captured = self._graphs.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > 4 * self._max_graphs:
                    self._seen.popitem(last=False)
                return function(queries)
            captured = self._capture(queries, function)
            self._graphs[key] = captured
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        torch._foreach_copy_(captured.queries.tensors(), queries.tensors())
        captured.graph.replay()
        return captured.output

    def _capture(self, queries: DeviceQueries, function: Callable[[DeviceQueries], Output]) -> _Captured[Output]:
        own = replace(
            queries,
            components=queries.components.clone(),
            gate=None if queries.gate is None else queries.gate.clone(),
            half=queries.half.clone(),
            half_gate=queries.half_gate.clone(),
            errors=queries.errors.clone(),
            double_error=queries.double_error.clone(),
        )
        # Run once outside the graph, on the capturing stream: libraries set up workspaces on first use.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(own)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # During capture, this thread must not wait for the device; other threads may use it.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output = function(own)
        return _Captured(graph, own, output)
