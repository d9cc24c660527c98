"""The local stack with a replica of Redis behind a proxy, on one Kafka broker or three; and on a Redis Cluster.

It knows how the added servers are started and what may happen to them; nothing of what is written or compared.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import paths
import redis
from kafka import KafkaAdminClient

from services.contracts.processes import PROCESSES
from services.contracts.topics.interactions import INTERACTIONS
from services.stack import Ports, Stack
from services.stack.children import Launch
from services.stack.components.component import Component, Place, run_installer
from services.stack.components.kafka import Kafka
from services.stack.errors import StackError
from services.stack.folders import StateFolder
from services.stack.ports import LOOPBACK
from services.user_state.layout import EPOCH_KEY

sys.path.append(str(paths.TESTS))
from fakes.redis_cluster import RedisCluster

WITHIN_S = 90.0
LEADER = "SIGKILL the broker that leads most of interactions"
CONTROLLER = "SIGKILL the controllers' leader"
TWO = "SIGKILL two of three brokers"
# Of these. A broker's session is 3 s; beside two trainings the other two took events again only after 8.4.
AWAY_S = 15.0
# A controller's note of who leads.
_QUORUM = Path("__cluster_metadata-0", "quorum-state")
_CLUSTER = "ZnJlc2hldC1jaGFvcy0xMQ"
# Of a broker where there are three: the topics that Kafka makes itself, and a smaller heap.
_ONE_OF_THREE = {
    "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "3",
    "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "3",
    "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "2",
    "KAFKA_SHARE_COORDINATOR_STATE_TOPIC_REPLICATION_FACTOR": "3",
    "KAFKA_SHARE_COORDINATOR_STATE_TOPIC_MIN_ISR": "2",
    "KAFKA_HEAP_OPTS": "-Xms64m -Xmx256m",
}


@dataclass(frozen=True)
class Broker(Kafka):
    """One node of several: a broker and a controller, as the stack's only one is."""

    voters: str

    def launch(self, place: Place) -> Launch:
        launch = super().launch(place)
        self._join(place.state.data(self.name) / "server.properties")
        return launch

    def _join(self, properties: Path) -> None:
        with properties.open("a", encoding="utf-8") as file:  # of a key that is there twice the later line counts
            file.write(f"controller.quorum.voters={self.voters}\n")

    def _format(self, properties: Path) -> None:
        self._join(properties)
        argv = [*self._java("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"), "kafka.tools.StorageTool", "format"]
        argv += [f"--cluster-id={_CLUSTER}", "-c", str(properties)]
        run_installer(self.name, argv, advice=f"remove {properties.parent}", timeout_s=120)


class Setting(Stack):
    """A stack in a new folder with servers of its own. lacks: what may happen to any stack but this one. undrawn: what
    happens only where it is named."""

    setting: str
    lacks: frozenset[str] = frozenset()
    undrawn: frozenset[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ports=Ports.free())

    def now(self, part: str) -> str:
        """The server that is this part now."""
        return part

    def faults(self) -> dict[str, Callable[[random.Random], dict[str, Any]]]:
        """What may happen to this setting beside what may happen to any stack; each returns how it happened."""
        return {}

    def _tell(self, said: Mapping[str, str]) -> None:
        """Start processes with these settings."""
        for name in PROCESSES:
            service = self.components[name].service
            settings = {**service.environment, **said}
            self.components[name] = replace(self.components[name], service=replace(service, environment=settings))


class Clustered(Setting):
    """One broker, and three masters of Redis with a replica each."""

    setting = "one broker, Redis Cluster of three masters and three replicas"
    # They are done to one server's whole data.
    lacks = frozenset({"SIGKILL redis", "SIGSTOP redis", "memory limit of Redis", "older copy of Redis"})

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cluster = RedisCluster(folder / "cluster")
        self._tell({"FRESHET_REDIS_URL": self.cluster.url})

    @property
    def redis_url(self) -> str:
        return self.cluster.url

    def up(self, *args: Any, **options: Any) -> None:
        if not self.cluster.is_up:
            self.cluster.up()
        super().up([name for name in self.parts if name != "redis"], timeout_s=WITHIN_S)

    def down(self) -> list[str]:
        stopped = super().down()
        self.cluster.down()
        return stopped

    def faults(self) -> dict[str, Callable[[random.Random], dict[str, Any]]]:
        return {"SIGKILL a master of Redis": self._kill_master, "a master of Redis loses its tail": self._lose_tail}

    def _kill_master(self, rng: random.Random, *, behind_s: float = 0.0) -> dict[str, Any]:
        """Its replica takes over; what was killed before is one's replica again."""
        self.cluster.heal()
        number = rng.choice(self.cluster.masters())
        is_of_epoch = number == self.cluster.master_of(EPOCH_KEY)
        if behind_s:
            self.cluster.fall_behind(number)
            time.sleep(behind_s)
        return {"promoted_s": round(self.cluster.fail_over(number), 2), "behind_s": behind_s, "epoch": is_of_epoch}

    def _lose_tail(self, rng: random.Random) -> dict[str, Any]:
        """The replica takes over without what came in the last half second to two."""
        return self._kill_master(rng, behind_s=round(rng.uniform(0.5, 2.0), 2))


@dataclass(frozen=True)
class Outage:
    """These brokers were away, in seconds of the monotonic clock."""

    brokers: tuple[str, ...]
    killed: float
    started: float


class Engines(Setting):
    """A stack with a replica of Redis. brokers: 1 or 3."""

    undrawn = frozenset({LEADER, CONTROLLER, TWO})

    def __init__(self, folder: Path, brokers: int) -> None:
        super().__init__(folder)
        others = {number: Ports.free() for number in (2, 3)}
        self.setting = f"{'three brokers' if brokers == 3 else 'one broker'}, Redis with a replica"
        self.primary, self.replica = "redis", "redis-2"
        self._more: dict[str, tuple[Component, Place]] = {}
        self._brokers = ["kafka"]
        self.outages: list[Outage] = []
        self._add("redis-2", self.components["redis"], others[2])
        if brokers == 3:
            self._three_brokers({1: self.ports, **others})
        self._proxy = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("proxy.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._proxy.stdout is not None
        self._proxy_port = int(self._proxy.stdout.readline())
        self._point(self.primary)
        self._tell({"FRESHET_REDIS_URL": self.redis_url, "FRESHET_KAFKA_BOOTSTRAP": self.kafka_bootstrap})

    def _add(self, name: str, component: Component, ports: Ports) -> None:
        folder = StateFolder(self.place.state.root / name)
        self._more[name] = component, replace(self.place, state=folder, ports=ports)

    def _three_brokers(self, ports: Mapping[int, Ports]) -> None:
        voters = ",".join(f"{node}@{LOOPBACK}:{its['kafka-controller']}" for node, its in ports.items())
        service = self.components["kafka"].service
        for node, its in ports.items():
            settings = {**service.environment, **_ONE_OF_THREE, "KAFKA_NODE_ID": str(node)}
            broker = Broker(replace(service, environment=settings), voters)
            if node == 1:
                self.components["kafka"] = broker
            else:
                self._add(f"kafka-{node}", broker, its)
                self._brokers.append(f"kafka-{node}")

    @property
    def redis_url(self) -> str:
        return f"redis://{LOOPBACK}:{self._proxy_port}/0"

    @property
    def kafka_bootstrap(self) -> str:
        return ",".join(self._place(name).ports.address("kafka") for name in self._brokers)

    def up(self, *args: Any, **options: Any) -> None:
        """As the stack's, and every broker and replica is in sync."""
        for name in self._more:
            if self._children.find(name) is None:
                self.place.state.make()
                self._start_other(name)
        super().up(["kafka", "redis"], timeout_s=WITHIN_S)
        self.wait("the brokers", lambda: self.registered() == len(self._brokers))
        with self._client(self.replica) as replica:
            replica.replicaof(LOOPBACK, str(self._place(self.primary).ports["redis"]))
        self.wait("the replica", self._replica_in_sync)
        super().up(*args, **options)
        self.wait("all replicas of all partitions", self._in_sync)

    def start(self, name: str, *, wait: bool = True, timeout_s: float = WITHIN_S) -> None:
        if name not in self._more:
            super().start(name, wait=wait, timeout_s=timeout_s)
            return
        self._start_other(name)
        component, place = self._more[name]
        self.wait(name, lambda: component.probe(place) is None)

    def down(self) -> list[str]:
        stopped = super().down()
        for name in self._more:
            self.kill(name)
        self._proxy.terminate()
        self._proxy.communicate()
        return stopped

    def now(self, part: str) -> str:
        """Redis is whichever one is the primary."""
        return self.primary if part == "redis" else part

    def faults(self) -> dict[str, Callable[[random.Random], dict[str, Any]]]:
        several = {
            "SIGKILL one of three brokers": self._kill_broker,
            "SIGSTOP one of three brokers": self._pause_broker,
            "one of three brokers loses its tail": self._lose_tail,
            LEADER: lambda rng: self._kill_brokers(self._leader_of(INTERACTIONS)),
            CONTROLLER: lambda rng: self._kill_brokers(self._controller()),
            TWO: lambda rng: self._kill_brokers(*self._two_with_the_coordinator()),
        }
        return {"lagging replica promoted": self._promote, **(several if len(self._brokers) == 3 else {})}

    # What happens.

    def _promote(self, rng: random.Random) -> dict[str, Any]:
        """The replica loses its link, takes over without what came since, and the old primary copies it."""
        self.wait("the replica", self._replica_in_sync)
        with self._client(self.primary) as old, self._client(self.replica) as new:
            new.replicaof(LOOPBACK, "1")  # nobody listens there; its data stay
            time.sleep(rng.uniform(0.5, 2.0))
            behind = old.info("replication")["master_repl_offset"] - new.info("replication")["slave_repl_offset"]
            new.replicaof("NO", "ONE")
            self._point(self.replica)
            self.primary, self.replica = self.replica, self.primary
            old.replicaof(LOOPBACK, str(self._place(self.primary).ports["redis"]))
        return {"behind_bytes": behind}

    def _kill_broker(self, rng: random.Random) -> dict[str, Any]:
        return self._kill_brokers(rng.choice(self._brokers), away_s=rng.uniform(0.2, 6.0))

    def _kill_brokers(self, *names: str, away_s: float = AWAY_S) -> dict[str, Any]:
        self.wait("all replicas of all partitions", self._in_sync)
        killed = time.monotonic()
        for name in names:
            self.kill(name)
        time.sleep(away_s)
        self.outages.append(Outage(names, killed, time.monotonic()))
        for name in names:
            self.start(name)
        return {"broker": ", ".join(names), "away_s": round(away_s, 1)}

    def _leader_of(self, topic: str) -> str:
        """The broker that leads most partitions of a topic."""
        (found,) = self._ask_kafka(lambda admin: admin.describe_topics([topic]))
        return self._named(max(Counter(one["leader"] for one in found["partitions"]).items(), key=itemgetter(1))[0])

    def _controller(self) -> str:
        """The broker whose controller leads the others. Clients are not told: they get a random broker's number."""
        files = [self._place(name).state.data("kafka") / "log" / _QUORUM for name in self._brokers]
        newest = max((json.loads(file.read_text()) for file in files), key=itemgetter("leaderEpoch"))
        return self._named(newest["leaderId"])

    def _two_with_the_coordinator(self) -> list[str]:
        """The broker that keeps the groups' progress, and the next one."""
        place = self._brokers.index(self._leader_of("__consumer_offsets"))
        return [self._brokers[place], self._brokers[(place + 1) % len(self._brokers)]]

    def _named(self, node: int) -> str:
        return self._brokers[node - 1]

    def _pause_broker(self, rng: random.Random) -> dict[str, Any]:
        self.wait("all replicas of all partitions", self._in_sync)
        name = rng.choice(self._brokers)
        process = self._children.find(name)
        assert process is not None
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.5, 6.0))
        os.killpg(process.pid, signal.SIGCONT)
        return {"broker": name}

    def _lose_tail(self, rng: random.Random) -> dict[str, Any]:
        """A broker is killed, and the last bytes that it wrote of each partition are gone."""
        lost = 0
        self.wait("all replicas of all partitions", self._in_sync)
        name = rng.choice(self._brokers)
        self.kill(name)
        for folder in sorted(self._place(name).state.data("kafka").glob("log/[!_]*-[0-9]*/")):
            last = max(folder.glob("*.log"))
            size = last.stat().st_size
            lost += (less := min(size, rng.randrange(4096)))
            os.truncate(last, size - less)
        time.sleep(rng.uniform(0.2, 6.0))
        self.start(name)
        return {"broker": name, "lost_bytes": lost}

    # How it is.

    def _place(self, name: str) -> Place:
        return self._more[name][1] if name in self._more else self.place

    def _start_other(self, name: str) -> None:
        component, place = self._more[name]
        self._children.spawn(name, component.launch(place), self.log(name))

    def _client(self, name: str) -> redis.Redis:
        return redis.Redis(host=LOOPBACK, port=self._place(name).ports["redis"], socket_timeout=10)

    def _point(self, name: str) -> None:
        assert self._proxy.stdin is not None
        assert self._proxy.stdout is not None
        self._proxy.stdin.write(f"{self._place(name).ports['redis']}\n")
        self._proxy.stdin.flush()
        self._proxy.stdout.readline()

    def _replica_in_sync(self) -> bool:
        with self._client(self.replica) as replica:
            said = replica.info("replication")
        return said["role"] == "slave" and said["master_link_status"] == "up"

    def _ask_kafka(self, ask: Callable[[KafkaAdminClient], Any]) -> Any:
        admin = KafkaAdminClient(bootstrap_servers=self.kafka_bootstrap.split(","))
        try:
            return ask(admin)
        finally:
            admin.close()

    def registered(self) -> int:
        """The number of brokers that the cluster knows."""
        return len(self._ask_kafka(KafkaAdminClient.describe_cluster)["brokers"])

    def _in_sync(self) -> bool:
        topics = self._ask_kafka(KafkaAdminClient.describe_topics)
        return all(len(one["isr"]) == len(self._brokers) for topic in topics for one in topic["partitions"])

    def wait(self, what: str, look: Callable[[], Any]) -> None:
        """Until `look` returns something true; an exception counts as false."""
        deadline, problem = time.monotonic() + WITHIN_S, ""
        while True:
            try:
                if look():
                    return
            except Exception as exc:  # it has just been started, or killed
                problem = repr(exc)
            if time.monotonic() > deadline:
                raise StackError(what, f"not in sync within {WITHIN_S} s {problem}")
            time.sleep(0.2)
