"""Reads the services' commands, settings and order from docker-compose.yml for the launcher.

`localize` replaces a container's address such as "kafka:19094" by the address in this stack.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from services.contracts.processes import FULL_CPU_SHARES, KEYS, PROCESSES, SECRETS
from services.stack.folders import REPOSITORY
from services.stack.ports import LOOPBACK, PARTS, Ports

Profile = Literal["split", "compact"]
# In a compact stack, IN_GATEWAY run in the gateway's process, and NOT_COMPACT do not run.
IN_GATEWAY, NOT_COMPACT = ("candidates", "reranker"), ("inference-server",)
COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service with its variables filled in. `needs` maps each required service to whether it must be healthy."""

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, bool] = field(default_factory=dict)
    published: tuple[int, ...] = ()
    cpu_shares: int = FULL_CPU_SHARES


def read_compose(path: Path = COMPOSE_FILE, environ: Mapping[str, str] | None = None) -> dict[str, Service]:
    """Return the services by name, without services that run once.

    Raises: FileNotFoundError if there is no such file; ValueError for a variable without value and default.
    """
    environ = os.environ if environ is None else environ
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the local stack is started from a clone of the repository")
    raw = _filled(yaml.safe_load(path.read_text(encoding="utf-8")), environ)
    return {name: _service(name, entry) for name, entry in raw["services"].items() if entry.get("restart") != "no"}


def compact(services: Mapping[str, Service], workers: int = 1) -> dict[str, Service]:
    """Return a compact stack's services, where `workers` processes replace gateway, candidates and reranker.

    There is no inference server.
    """
    left = {name: service for name, service in services.items() if name not in (*IN_GATEWAY, *NOT_COMPACT)}
    settings = {key: value for name in IN_GATEWAY for key, value in services[name].environment.items()}
    gateway = left["gateway"]
    left["gateway"] = replace(
        gateway,
        command=("python", "-m", "services.compact"),
        environment=settings | dict(gateway.environment) | {"FRESHET_COMPACT_WORKERS": str(workers)},
    )
    left["encoder"] = replace(
        left["encoder"], environment=dict(left["encoder"].environment) | {"FRESHET_ENCODER_ENGINE": "in-process"}
    )
    return {
        name: replace(service, needs={other: how for other, how in service.needs.items() if other in left})
        for name, service in left.items()
    }


def sharded(services: Mapping[str, Service], addresses: str) -> dict[str, Service]:
    """Return the services with candidates in shards at these addresses."""
    left = {name: service for name, service in services.items() if name != "candidates"}
    gateway = left["gateway"]
    left["gateway"] = replace(
        gateway,
        environment=dict(gateway.environment) | {"FRESHET_CANDIDATES_ADDRESS": addresses},
        needs={other: how for other, how in gateway.needs.items() if other != "candidates"},
    )
    return left


def localize(value: str, ports: Ports, bundle: Path, text: Path) -> str:
    """Return a container's setting with this machine's hosts, bind address and bundles."""
    if value == "0.0.0.0":
        return LOOPBACK
    folders = {"/bundle": str(bundle), "/text": str(text)}
    value = re.sub(r"(?<![\w.-])(/bundle|/text)(?=$|/)", lambda match: folders[match[1]], value)
    hosts = "|".join(PARTS)
    return re.sub(rf"(?<![\w.-])({hosts}):\d+", lambda match: ports.address(match[1]), value)


def local_environment(service: Service, ports: Ports, bundle: Path, text: Path) -> dict[str, str]:
    """Return a process's settings, with this stack's port."""
    environment = {
        name: localize(value, ports, bundle, text)
        for name, value in service.environment.items()
        # Key files are omitted, because the loopback address needs no keys.
        if not value.startswith((f"{KEYS}/", f"{SECRETS}/"))
    }
    if service.name in PROCESSES:
        environment[PROCESSES[service.name].port_variable] = str(ports[service.name])
        if PROCESSES[service.name].has_http:
            environment[PROCESSES[service.name].http_port_variable] = str(ports[f"{service.name}-http"])
        environment["FRESHET_METRICS_PORT"] = str(ports[f"{service.name}-metrics"])
    return environment


def _service(name: str, entry: Mapping[str, Any]) -> Service:
    depends = entry.get("depends_on", {})
    if isinstance(depends, list):
        depends = {other: {"condition": "service_started"} for other in depends}
    command = entry.get("command", [])
    if isinstance(command, str):
        raise ValueError(f"services.{name}.command is a string; a list is expected, so that no shell is involved")
    return Service(
        name=name,
        image=entry.get("image", ""),
        command=tuple(str(part) for part in command),
        environment={key: str(value) for key, value in entry.get("environment", {}).items()},
        needs={
            other: how["condition"] == "service_healthy"
            for other, how in depends.items()
            if how["condition"] != "service_completed_successfully"
        },
        published=tuple(int(str(port).rpartition(":")[2]) for port in entry.get("ports", [])),
        cpu_shares=int(entry.get("cpu_shares") or FULL_CPU_SHARES),
    )


def _filled(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(entry, environ) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, environ) for entry in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        found = environ.get(name) or default
        if found is None:
            raise ValueError(f"docker-compose.yml uses {name}, which has no value and no default")
        return found

    return _VARIABLE.sub(fill, value)
