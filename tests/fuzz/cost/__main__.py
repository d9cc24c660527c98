"""`make cost`: what one caller's dear requests cost the others, at every process and door; what costs too much is told.

python tests/fuzz/cost [--only PREFIX] [--tries N] [--timeout S]

A second caller asks every few milliseconds. Of each input: the largest delay that it sees above the p99 of an idle
process (at most 50 ms), and what the process has grown by when it is over (at most five of its largest messages: 20 MB
at the gateway). A delay counts if it comes again: the smallest of the tries. Processor time of the process during the
delayed call is an upper bound of it on a machine that others use, too. Exit status 1 when an input costs more. The last
line of stdout is JSON.
"""

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import paths
import psutil
from freshet.v1 import common_pb2
from inputs import Input, inputs_of
from rpcs import ENDLESS, SECRET, Rpc, Service, rpc_targets

_WARM_UP = 10
MAX_DELAY_S = 0.05
# What gRPC and the allocator keep is some of the largest messages: 20 MB at the gateway.
MAX_GROWTH_MESSAGES = 5
_CLIENT_BYTES, _INSIDE_BYTES = 4 << 20, 16 << 20
_KEY = (("authorization", f"Bearer {SECRET}"),)
# Asked by the other caller; small, and answered by every gateway.
_PROBES = {"GatewayService": "Recommend", "CandidatesService": "GetIndexInfo", "RerankerService": "GetRerankerInfo"}
_PROBES |= {"EncoderService": "DescribeUser", "RefresherService": "GetStatus", "GeneratorService": "GetGeneratorInfo"}


class Process:
    """A server in a process of its own, and another caller who asks it all the time."""

    def __init__(self, service: Service) -> None:
        self.service = service
        command = [sys.executable, str(Path(__file__).with_name("serving.py")), service.name]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self.ports = json.loads(self._child.stdout.readline())
        self.state = common_pb2.QueryState.FromString(bytes.fromhex(self.ports["state"]))
        # A channel of its own for each caller.
        options = [("grpc.max_send_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{self.ports['grpc']}", options) for _ in range(2)]
        probe = _PROBES[service.name]
        (rpc,) = [one for one in service.rpcs if one.name == probe]
        self._ask = self._channels[0].unary_unary(f"/freshet.v1.{service.name}/{probe}")
        self._asked = rpc.valid(self.state)[-1 if probe == "Recommend" else 0].SerializeToString()
        self._ended = threading.Event()
        self.delays: list[float] = []
        self._asking = threading.Thread(target=self._ask_on, daemon=True)
        self._asking.start()

    def _ask_on(self) -> None:
        while not self._ended.is_set():
            began, began_cpu_s = time.perf_counter(), self._ran_s()
            with contextlib.suppress(grpc.RpcError):
                self._ask(self._asked, timeout=120, metadata=_KEY)
            self.delays.append(min(time.perf_counter() - began, self._ran_s() - began_cpu_s))
            time.sleep(0.003)

    def send(self, method: str, one: Input, timeout_s: float) -> str:
        """The status."""
        if one.is_json:
            caller = http.client.HTTPConnection("127.0.0.1", self.ports["http"], timeout=timeout_s)
            headers = {"content-type": "application/json", **dict(_KEY)}
            try:
                caller.request("POST", f"/freshet.v1.{self.service.name}/{method}", one.data, headers)
                return str(caller.getresponse().status)
            except OSError as exc:
                return type(exc).__name__
            finally:
                caller.close()
        (rpc,) = [rpc for rpc in self.service.rpcs if rpc.name == method]
        path = f"/freshet.v1.{self.service.name}/{method}"
        try:
            if rpc.streams:
                self._channels[1].stream_unary(path)(iter([one.data]), timeout=timeout_s, metadata=_KEY)
            else:
                self._channels[1].unary_unary(path)(one.data, timeout=timeout_s, metadata=_KEY)
        except grpc.RpcError as exc:
            return str(exc.code().name)
        return "OK"

    def _ran_s(self) -> float:
        """Processor time of all threads."""
        tasks = Path(f"/proc/{self._child.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def rss(self) -> int:
        """Resident bytes, once they fall no more."""
        time.sleep(1.2)  # Large requests are given back after a second.
        before, now = 1 << 62, self._rss()
        while now < before - (1 << 20):
            time.sleep(0.3)
            before, now = now, self._rss()
        return now

    def _rss(self) -> int:
        return int(psutil.Process(self._child.pid).memory_info().rss)

    def cpu_s(self) -> float:
        """Processor time so far."""
        times = psutil.Process(self._child.pid).cpu_times()
        return float(times.user + times.system)

    def watched(self, since: int) -> float:
        """The largest delay from a place of `delays` on, of calls that have ended."""
        time.sleep(0.05)
        # The call that is under way now ends later.
        until = len(self.delays) + 1
        while len(self.delays) < until:
            time.sleep(0.005)
        return max(self.delays[since:])

    def close(self) -> None:
        """End it."""
        self._ended.set()
        self._asking.join()
        for channel in self._channels:
            channel.close()
        self._child.communicate("", timeout=20)


@dataclass
class Cost:
    """Of one input."""

    name: str
    status: str
    size: int
    delay_s: float
    cpu_s: float
    grown_bytes: int
    max_grown_bytes: int

    @property
    def is_too_much(self) -> bool:
        return self.delay_s > MAX_DELAY_S or self.grown_bytes > self.max_grown_bytes


def _size(service: Service) -> int:
    return _CLIENT_BYTES if service.name == "GatewayService" else _INSIDE_BYTES


def named_inputs(service: Service, state: common_pb2.QueryState, prefix: str) -> Iterator[tuple[str, Rpc, Any]]:
    """Of all methods."""
    is_gateway = service.name == "GatewayService"
    size = _size(service)
    for rpc in service.rpcs:
        if rpc.name == ENDLESS:
            continue
        valid = rpc.valid(state)[0]
        for by_json in (False, True) if is_gateway and not rpc.streams else (False,):
            for name, make in inputs_of(valid.DESCRIPTOR, valid, size, by_json=by_json):
                if (whole := f"{service.name}.{rpc.name}:{name}").startswith(prefix):
                    yield whole, rpc, make


def measure(service: Service, prefix: str, tries: int, timeout_s: float) -> list[Cost]:
    """All inputs of a process."""
    process = Process(service)
    costs: list[Cost] = []
    try:
        # Large requests that are allowed leave the buffers that the process needs for them.
        for name, rpc, make in named_inputs(service, process.state, service.name):
            if name.endswith(":valid"):
                one = make()
                for _ in range(_WARM_UP):
                    process.send(rpc.name, one, timeout_s)
        process.delays.clear()
        time.sleep(2)
        idle = sorted(process.delays[len(process.delays) // 2 :])
        p99 = idle[int(len(idle) * 0.99)]
        before, most = process.rss(), MAX_GROWTH_MESSAGES * _size(service)
        sys.stderr.write(f"{service.name}: idle p99 {p99 * 1000:.1f} ms, {before >> 20} MiB\n")
        for name, rpc, make in named_inputs(service, process.state, prefix):
            one, best = make(), None
            for _ in range(tries):
                since, cpu_s = len(process.delays), process.cpu_s()
                status = process.send(rpc.name, one, timeout_s)
                delay_s = process.watched(since) - p99
                cost = Cost(name, status, len(one.data), delay_s, process.cpu_s() - cpu_s, process.rss() - before, most)
                best = cost if best is None or cost.delay_s < best.delay_s else best
                if best.delay_s <= MAX_DELAY_S / 2 or best.delay_s > 10 * MAX_DELAY_S:
                    break
            assert best is not None
            costs.append(best)
            sys.stderr.write(
                f"{'!' if best.is_too_much else ' '} {name}: {best.status}, delay {best.delay_s * 1000:.0f} ms, "
                f"processor {best.cpu_s * 1000:.0f} ms, grown {best.grown_bytes / 2**20:.1f} MiB\n"
            )
    finally:
        process.close()
    return costs


def main() -> int:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that begin so")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=60.0)
    asked = parser.parse_args()
    costs: list[Cost] = []
    for service in rpc_targets():
        if isinstance(service, Service) and service.name.startswith(asked.only[: len(service.name)]):
            costs += measure(service, asked.only, asked.tries, asked.timeout)
    if not costs:
        parser.error(f"--only {asked.only!r}: no input's name begins so; names are like GatewayService.Recommend:valid")
    dear = [one for one in costs if one.is_too_much]
    report = {
        "inputs": len(costs),
        "too_dear": [one.name for one in dear],
        "worst_delay_ms": round(max(one.delay_s for one in costs) * 1000, 1),
        "grown_mib": round(max(one.grown_bytes for one in costs) / 2**20, 1),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if dear else 0


assert paths
if __name__ == "__main__":
    sys.exit(main())
