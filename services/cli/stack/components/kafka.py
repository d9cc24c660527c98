"""Apache Kafka, one KRaft node: jars by Maven from deploy/kafka/pom.xml, settings from docker-compose.yml.

The image's rule KAFKA_A_B -> a.b makes the same server.properties here; only addresses and the data folder are this
stack's own. It knows nothing of topics.
"""

import base64
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.cli.stack.children import Launch
from services.cli.stack.components.component import Place, Say, inherited_environment, run_installer
from services.cli.stack.compose import Service
from services.cli.stack.errors import StackError
from services.cli.stack.folders import REPOSITORY, build_once, cache_root, recipe_key
from services.cli.stack.ports import LOOPBACK, Ports
from services.cli.stack.probes import probe_kafka

RECIPE = REPOSITORY / "deploy" / "kafka" / "pom.xml"
LOGGING = REPOSITORY / "deploy" / "kafka" / "log4j2.yaml"
MIN_JAVA = 17
INSTALL = "apt-get install -y openjdk-17-jre-headless maven"
_JVM_ONLY = ("KAFKA_HEAP_OPTS", "KAFKA_JVM_PERFORMANCE_OPTS")


@dataclass(frozen=True)
class Kafka:
    """The broker and its controller, one JVM."""

    service: Service
    name: str = "kafka"

    @property
    def folder(self) -> Path:
        """Where the jars are, or will be."""
        return cache_root() / f"kafka-{recipe_key(RECIPE)}"

    def missing(self) -> tuple[str, str] | None:
        absent = self.absent()
        if absent is not None:
            return absent, INSTALL
        found = java_version()
        if found is None or found < MIN_JAVA:
            return f"Java {found or 'of unknown version'} is too old; Kafka needs {MIN_JAVA} or newer", INSTALL
        return None

    def absent(self) -> str | None:
        """The program that is not here at all, without running any."""
        if _java_program() is None:
            return "no Java on the path"
        if not (self.folder / ".complete").exists() and shutil.which("mvn") is None:
            return "no Maven on the path, which fetches Kafka's jars"
        return None

    def prepare(self, say: Say) -> None:
        problem = self.missing()
        if problem is not None:
            raise StackError(self.name, problem[0], advice=problem[1])

        def fetch(folder: Path) -> None:
            say(self.name, "fetching Apache Kafka's jars by Maven (once, 44 MB)")
            goal = "dependency:copy-dependencies"
            argv = ["mvn", "-B", "-ntp", "-q", "-f", str(RECIPE), goal, "-DincludeScope=runtime"]
            argv.append(f"-DoutputDirectory={folder / 'libs'}")
            run_installer(self.name, argv, advice="check the network, or Maven's settings for a mirror")

        build_once(self.folder, fetch)

    def launch(self, place: Place) -> Launch:
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
            environment=inherited_environment(),
            cwd=data,
        )

    def probe(self, place: Place) -> str | None:
        return probe_kafka(place.ports.address("kafka"))

    def version(self, place: Place) -> str:
        """The version that the running broker wrote to its log."""
        log = place.state.log(self.name)
        found = re.findall(r"Kafka version: (\S+)", log.read_text(errors="replace")) if log.exists() else []
        if not found:
            raise StackError(self.name, f"no version in {log}")
        return f"Apache Kafka {found[-1]} (KRaft)"

    def _java(self, *flags: str) -> list[str]:
        classpath = str(self.folder / "libs" / "*")
        return [_java_program() or "java", *flags, f"-Dlog4j2.configurationFile={LOGGING}", "-cp", classpath]

    def _format(self, properties: Path) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        argv = [*self._java("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"), "kafka.tools.StorageTool", "format"]
        argv += [f"--cluster-id={cluster}", "-c", str(properties)]
        run_installer(self.name, argv, advice=f"remove {properties.parent} and start again", timeout_s=120)


def server_properties(environment: Mapping[str, str], ports: Ports, log_folder: Path) -> dict[str, str]:
    """server.properties from the container's environment, with this stack's addresses and data folder."""
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


def java_version() -> int | None:
    """The major version of the Java that would be used, or None."""
    program = _java_program()
    if program is None:
        return None
    try:
        told = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d+)', told.stderr + told.stdout)
    return int(match[1]) if match else None


def _java_program() -> str | None:
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return str(Path(home) / "bin" / "java")
    return shutil.which("java")
