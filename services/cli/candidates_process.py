"""Starts a candidates process that serves a bundle without Kafka, for benchmarks over gRPC."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, common_pb2

from services.algorithms.scoring.states import QueryStates
from services.offline.evaluation.large.rows import K, Served
from services.platform.rpc.health_check import probe_grpc

_PATIENCE_S = 600.0


@contextmanager
def serving(bundle: Path, algorithms: Sequence[str], *, port: int) -> Iterator[Served]:
    """Start the process, wait until it is ready, and stop it after the block. Its log is next to the bundle.

    Raises: RuntimeError with the log's end if the process ends, or is not ready in ten minutes.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")} | {
        "FRESHET_BUNDLE": str(bundle),
        "FRESHET_CANDIDATES_PORT": str(port),
        "FRESHET_METRICS_PORT": "0",
        "FRESHET_CANDIDATES_FOLLOWS_TOPICS": "false",
        "FRESHET_CANDIDATES_AUDIT_SHARE": "0",
        "FRESHET_CANDIDATES_SNAPSHOTS": str(bundle.parent / "snapshots"),
        "FRESHET_CANDIDATES_ALGORITHMS": " ".join(algorithms),
    }
    address, began = f"127.0.0.1:{port}", time.monotonic()
    log = bundle.parent / "candidates.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.candidates"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while probe_grpc(address) is not None:
            if child.poll() is not None or time.monotonic() - began > _PATIENCE_S:
                raise RuntimeError(f"candidates did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        start_s = time.monotonic() - began
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 16 << 20)]
        with grpc.insecure_channel(address, options) as channel:
            stub = candidates_pb2_grpc.CandidatesServiceStub(channel)  # type: ignore[no-untyped-call]
            version = stub.GetIndexInfo(candidates_pb2.GetIndexInfoRequest(), timeout=10).model_version

            def search(query: QueryStates, algorithm: str) -> Sequence[str]:
                return list(stub.Search(_request(query, algorithm, version), timeout=60).item_ids)

            process = psutil.Process(child.pid)
            yield Served(search=search, start_s=start_s, resident_bytes=lambda: process.memory_info().rss)
    finally:
        child.terminate()
        child.wait(timeout=_PATIENCE_S)  # the process may be writing a large snapshot


def _request(query: QueryStates, algorithm: str, model_version: str) -> candidates_pb2.SearchRequest:
    _, num_components, width = query.components.shape
    state = common_pb2.QueryState(
        model_version=model_version,
        components=query.components.astype("<f2").tobytes(),
        num_components=num_components,
        component_width=width,
        gate=b"" if query.gate is None else query.gate.astype("<f2").tobytes(),
    )
    return candidates_pb2.SearchRequest(query_state=state, k=K, stage=candidates_pb2.STAGE_FULL, algorithm=algorithm)
