"""What TLS costs per call: processor time of an RPC that does nothing, plaintext beside mTLS, in turns.

Run `python docs/benchmarks/tls_cost.py` from the repository. Client and server are our own kit, in a process each; the
RPC is gRPC health's Check, one call after the other. The last line is JSON: medians over the rounds, and quartiles.
"""

import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.certificates import make_certificates
from services.platform.config import ProcessSettings
from services.platform.rpc import client as rpc_client
from services.platform.rpc.server import RpcServer
from services.platform.transport import Tls

ROUNDS, CALLS, CONNECTIONS = 21, 1_000, 50
KINDS = ("plaintext", "mtls")


def tls_of(folder: Path, name: str) -> Tls:
    return Tls(certificate=folder / f"{name}.crt", key=folder / f"{name}.key", ca=folder / "ca.crt")


def serve(folder: Path | None, said: Connection) -> None:
    tls = tls_of(folder, "encoder") if folder else None
    files = {"tls_cert": tls.certificate, "tls_key": tls.key, "tls_ca": tls.ca} if tls else {}

    async def run() -> None:
        settings = ProcessSettings(port=0, metrics_port=0, **files)
        server = RpcServer(process="bench", settings=settings, add_services=lambda _: [])
        await server.start()
        said.send(server.port)
        await asyncio.Event().wait()

    uvloop.run(run())


async def calls(address: str, tls: Tls | None, count: int) -> None:
    async with rpc_client.channel(address, tls=tls, shares=False) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(count):
            await check(health_pb2.HealthCheckRequest(), timeout=30)


async def connections(address: str, tls: Tls | None, count: int) -> None:
    for _ in range(count):
        await calls(address, tls, 1)


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Per kind: microseconds per call and milliseconds per connection, of each side, a value per round."""
    context = multiprocessing.get_context("spawn")
    servers, found = {}, {}
    for kind in KINDS:
        ours, theirs = context.Pipe()
        child = context.Process(target=serve, args=(folder if kind == "mtls" else None, theirs), daemon=True)
        child.start()
        tls = tls_of(folder, "gateway") if kind == "mtls" else None
        servers[kind] = (f"127.0.0.1:{ours.recv()}", tls, psutil.Process(child.pid))
        found[kind] = {"client_us": [], "server_us": [], "connect_client_ms": [], "connect_server_ms": []}
    for number in range(ROUNDS + 1):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            address, tls, child = servers[kind]
            for run, count, unit, prefix in ((calls, CALLS, 1e6, ""), (connections, CONNECTIONS, 1e3, "connect_")):
                server, client = spent(child), time.process_time()
                await run(address, tls, count)
                client, server = time.process_time() - client, spent(child) - server
                if number:  # the first one warms up
                    suffix = "us" if unit == 1e6 else "ms"
                    found[kind][f"{prefix}client_{suffix}"].append(client / count * unit)
                    found[kind][f"{prefix}server_{suffix}"].append(server / count * unit)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        found = uvloop.run(measure(Path(folder)))
    result = {
        kind: {name: [round(one, 2) for one in statistics.quantiles(values, n=4)] for name, values in columns.items()}
        for kind, columns in found.items()
    }
    about = {
        "rounds": ROUNDS,
        "calls_per_round": CALLS,
        "connections_per_round": CONNECTIONS,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    sys.stdout.write(json.dumps({"quartiles": result, **about}) + "\n")


if __name__ == "__main__":
    main()
