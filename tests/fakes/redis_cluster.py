"""A Redis Cluster of real servers on loopback: three masters, each with a replica, none of which keeps a file."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from services.stack import Ports, Stack
from services.stack.components.redis import Redis

HOST = "127.0.0.1"
MASTERS, SLOTS = 3, 16_384
# After so long without an answer a node is taken for dead.
NODE_TIMEOUT_MS = 1_000
# How far a server's second port lies above its first, and where Linux begins to give ports to clients.
_BUS, _CLIENTS = 10_000, 32_768
_WITHIN_S = 30.0


class RedisCluster:
    """Servers by number: the masters come first, then a replica of each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        component = Stack(folder / "stack").components["redis"]
        assert isinstance(component, Redis)
        component.prepare(lambda part, doing: None)
        self._program = component.program()
        self.ports = _free_ports(2 * MASTERS)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{port}" for port in self.ports)

    @property
    def is_up(self) -> bool:
        return bool(self._running)

    def up(self) -> None:
        """Start all of it, and return when every master has its replica."""
        for number in range(2 * MASTERS):
            self.start(number)
        ids = [self._wait("a server", partial(self._ask, number, "CLUSTER", "MYID")) for number in self._running]
        for number in range(MASTERS):
            first, last = (SLOTS * n // MASTERS for n in (number, number + 1))
            self._ask(number, "CLUSTER", "ADDSLOTS", *range(first, last))
            self._ask(number, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in self.ports[1:]:
            self._ask(0, "CLUSTER", "MEET", HOST, port)
        for number in range(MASTERS):
            self._wait("a replica", partial(self._ask, number + MASTERS, "CLUSTER", "REPLICATE", ids[number].decode()))
        self.wait_whole()

    def start(self, number: int) -> None:
        """A server that was killed comes back empty, as what the others take it for."""
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        options = {
            "port": self.ports[number],
            "bind": HOST,
            "dir": folder,
            "save": "",
            "cluster-enabled": "yes",
            "cluster-node-timeout": NODE_TIMEOUT_MS,
            # The users of the others are answered for meanwhile.
            "cluster-require-full-coverage": "no",
            "repl-diskless-sync-delay": 0,
        }
        argv = [self._program, *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
        with (folder / "log").open("ab") as log:
            self._running[number] = subprocess.Popen(argv, stdout=log, stderr=log)

    def kill(self, number: int) -> None:
        """SIGKILL."""
        process = self._running.pop(number)
        process.kill()
        process.wait(10)

    def fall_behind(self, number: int) -> None:
        """From now on the replica of a master gets nothing of what is written."""
        with self.client(self.replica_of(number)) as replica, self.client(number) as master:
            replica.config_set("masterauth", "wrong")
            master.execute_command("CLIENT", "KILL", "TYPE", "replica")
            self._wait("falling behind", lambda: replica.info("replication")["master_link_status"] == "down")

    def fail_over(self, number: int) -> float:
        """SIGKILL a master; the seconds until its replica serves its slots."""
        heir, began = self.replica_of(number), time.monotonic()
        self.kill(number)
        self._wait("promotion", lambda: b"myself,master" in self._ask(heir, "CLUSTER", "NODES"))
        return time.monotonic() - began

    def heal(self) -> None:
        """Start what was killed, as replicas of what took over."""
        for number in set(range(2 * MASTERS)) - set(self._running):
            self.start(number)
        for number in self._running:
            with self.client(number) as client:
                self._wait("a server", partial(client.config_set, "masterauth", ""))
        self.wait_whole()

    def down(self) -> None:
        for number in list(self._running):
            self.kill(number)

    def master_of(self, key: str) -> int:
        """The number of the server that has the key, as any other one knows it."""
        slot = key_slot(key.encode())
        for first, last, (_, port, *_), *_ in self._ask(next(iter(self._running)), "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return self.ports.index(port)
        raise AssertionError(key)

    def masters(self) -> list[int]:
        """The numbers of those that have slots."""
        rows = self._ask(next(iter(self._running)), "CLUSTER", "SLOTS")
        return sorted({self.ports.index(master[1]) for _, _, master, *_ in rows})

    def replica_of(self, number: int) -> int:
        """The number of a master's replica, once the master knows it: gossip may be later than the connection."""
        own_id = self._ask(number, "CLUSTER", "MYID")
        (said,) = self._wait("a known replica", partial(self._ask, number, "CLUSTER", "REPLICAS", own_id))
        return self.ports.index(int(said.split()[1].split(b"@")[0].rpartition(b":")[2]))

    def wait_whole(self) -> None:
        """Until every server sees all slots served, and every replica follows its master."""
        self._wait("the cluster", lambda: all(self._is_in_step(number) for number in self._running))

    def client(self, number: int) -> redis.Redis:
        """Of one server."""
        return redis.Redis(host=HOST, port=self.ports[number], socket_timeout=5)

    def _is_in_step(self, number: int) -> bool:
        with self.client(number) as client:
            said, role = client.execute_command("CLUSTER INFO"), client.info("replication")
        known = self._ask(number, "CLUSTER", "NODES").decode()
        is_alone = role["role"] == "master" and role["connected_slaves"] == 0 and len(self._running) == 2 * MASTERS
        is_apart = role["role"] == "slave" and role["master_link_status"] != "up"
        healthy = said["cluster_state"] == "ok" and said["cluster_slots_ok"] == str(SLOTS)
        return healthy and "handshake" not in known and not is_alone and not is_apart

    def _ask(self, number: int, *command: Any) -> Any:
        with self.client(number) as client:
            return client.execute_command(*command)

    def _wait(self, what: str, ask: Callable[[], Any]) -> Any:
        deadline, problem = time.monotonic() + _WITHIN_S, ""
        while True:
            try:
                if answer := ask():
                    return answer
            except redis.RedisError as exc:
                problem = repr(exc)
            assert time.monotonic() < deadline, f"{what}: not within {_WITHIN_S} s {problem}"
            time.sleep(0.02)


@contextmanager
def running_cluster(folder: Path) -> Iterator[RedisCluster]:
    """A cluster that is up, and down at the end."""
    cluster = RedisCluster(folder)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def _free_ports(count: int) -> list[int]:
    """Ports whose neighbours 10,000 above, by which the servers speak with each other, are not given to clients."""
    while True:
        ports = list(Ports.free().numbers.values())[:count]
        if max(ports) < _CLIENTS - _BUS and not any(map(_is_taken, (port + _BUS for port in ports))):
            return ports


def _is_taken(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex((HOST, port)) == 0
