"""One process with its doors, on memory ports: what `python tests/fuzz/cost` measures from outside.

python tests/fuzz/cost/serving.py SERVICE: one line of JSON says the ports; it ends when stdin does.
"""

import asyncio
import gc
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paths  # noqa: F401
import structlog
import uvloop
from freshet.v1 import gateway_pb2
from rpcs import MAX_REQUEST_BYTES, Service, rpc_targets

from services.gateway.config import GatewaySettings
from services.platform.http.server import HttpServer


async def serve(name: str) -> None:
    """Until stdin ends."""
    (service,) = [one for one in rpc_targets() if isinstance(one, Service) and one.name == name]
    with tempfile.TemporaryDirectory(prefix="freshet-cost-") as folder:
        async with service.start(Path(folder)) as process:
            http = None
            if process.servicer is not None:
                http = HttpServer(
                    settings=GatewaySettings(port=0, metrics_port=0, drain_seconds=0),
                    port=0,
                    services={gateway_pb2.DESCRIPTOR.services_by_name[name]: process.servicer},
                    guards=process.server.guards,
                    max_request_bytes=MAX_REQUEST_BYTES,
                    knows_callers=True,
                )
                await http.start()
            ports = {"grpc": process.server.port, "http": http.port if http is not None else 0}
            said = {**ports, "state": process.state.SerializeToString().hex()}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            # As `rpc_server.serve`.
            gc.collect()
            gc.freeze()
            turns = 0
            while not ended.done():
                # What memory ports keep, and what waits for the collector, does not stay.
                process.tidy()
                turns += 1
                if turns % 50 == 0:
                    gc.collect()
                await asyncio.sleep(0.02)
            if http is not None:
                await http.drain()


if __name__ == "__main__":
    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    sys.setswitchinterval(0.0005)  # as services.platform.process
    uvloop.run(serve(sys.argv[1]))
