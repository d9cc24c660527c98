"""What Helm made of the chart, compared with the process table and the compose file. It knows no profile by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from services.contracts.processes import CHECKPOINTS, KEYS, PROCESSES, SECRETS, TEXT, Process
from services.stack.compose import read_compose

COMPOSE = read_compose(environ={})
WORKLOADS = ("Deployment", "StatefulSet")
# Restored checkpoints are files, of which a cluster has none.
LEFT_OUT_STATE = {CHECKPOINTS}
# Said by the chart in compose's place.
OF_THE_CHART = {
    *("FRESHET_KAFKA_BOOTSTRAP", "FRESHET_REDIS_URL", "FRESHET_INFERENCE_SERVER", "FRESHET_ENCODER_ENGINE"),
    *(f"FRESHET_{name.upper()}_ADDRESS" for name in PROCESSES),
    *("FRESHET_REFRESHER_ADDRESSES", "FRESHET_REFRESHER_CHECKPOINTS"),
}


class Manifests:
    """The objects of one rendered release."""

    def __init__(self, text: str, release: str) -> None:
        self.release = release
        self.objects = [one for one in yaml.safe_load_all(text) if one]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [one for one in self.objects if one["kind"] in kinds]

    def workloads(self, component: str) -> list[dict[str, Any]]:
        """Deployments and stateful sets of a process or store."""
        return [one for one in self.of(*WORKLOADS) if labels(one)["app.kubernetes.io/component"] == component]

    def service(self, name: str) -> dict[str, Any]:
        (found,) = [one for one in self.of("Service") if one["metadata"]["name"] == name]
        return found


def labels(one: dict[str, Any]) -> dict[str, str]:
    return one["metadata"]["labels"]  # type: ignore[no-any-return]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return found  # type: ignore[no-any-return]


def environment(workload: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container(workload).get("env", [])}


def check(manifests: Manifests, values: dict[str, Any]) -> None:
    """All of it. `values`: what the release was rendered with, defaults included."""
    for row in PROCESSES.values():
        workloads = manifests.workloads(row.name)
        assert workloads, row.name
        for workload in workloads:
            check_process(row, workload, values)
            check_selected(manifests, row, workload)
    check_console(manifests, values)
    for workload in manifests.of(*WORKLOADS):
        check_confined(workload)
    check_addresses(manifests)
    check_shards(manifests, values)
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests.objects]
    assert len(names) == len(set(names)), "two objects of one name"


def check_process(row: Process, workload: dict[str, Any], values: dict[str, Any]) -> None:
    """Ports, health, image, memory, settings, order and state are the row's."""
    own, pod = container(workload), workload["spec"]["template"]["spec"]
    name = workload["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in own["ports"]}
    expected = {"grpc": row.port, "metrics": row.metrics_port} | ({"http": row.http_port} if row.has_http else {})
    assert ports == expected, name
    if values["tls"]["secret"]:
        assert own["readinessProbe"]["exec"]["command"][-1] == f"127.0.0.1:{row.port}", name
    else:
        assert own["readinessProbe"]["grpc"] == {"port": row.port, "service": row.health_service}, name
    assert own["livenessProbe"]["exec"]["command"][-2:] == [f"127.0.0.1:{row.port}", "--alive"], name
    assert own["command"] == ["python", "-m", row.module], name
    assert own["image"].rpartition("/")[2].partition(":")[0] == f"freshet-{row.extra}", name
    assert own["resources"]["limits"]["memory"] == own["resources"]["requests"]["memory"], name
    assert int(own["resources"]["limits"]["memory"].removesuffix("Mi")) > row.memory_mb, name
    settings = environment(workload)
    for setting, value in COMPOSE[row.name].environment.items():
        if setting not in OF_THE_CHART and value:
            assert settings[setting] == value, f"{name}: {setting}"
    # Whom it needs, it is told of.
    told = {"kafka": "FRESHET_KAFKA_BOOTSTRAP", "redis": "FRESHET_REDIS_URL"}
    told |= {peer: f"FRESHET_{peer.upper()}_ADDRESS" for peer in PROCESSES}
    assert {told[need] for need in row.needs if need in told} <= settings.keys(), name
    if "inference-server" in row.needs:
        asked = settings["FRESHET_ENCODER_ENGINE"] == "inference-server"
        assert asked == values["inferenceServer"]["enabled"], name
    mounted = {mount["mountPath"]: mount for mount in own["volumeMounts"]}
    states = {"/bundle", TEXT, KEYS, SECRETS, CHECKPOINTS}
    assert mounted.keys() & states == set(row.state) - LEFT_OUT_STATE, name
    assert all(mount["readOnly"] for path, mount in mounted.items() if path != "/tmp"), name
    assert pod["terminationGracePeriodSeconds"] > sum(values["drain"].values()), name
    if workload["kind"] == "Deployment":
        assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}, name


def check_console(manifests: Manifests, values: dict[str, Any]) -> None:
    """One pod asks the gateway under its Service's name, and a policy lets it in."""
    (workload,), service = manifests.workloads("console"), manifests.service(f"{manifests.release}-console")
    settings, port = environment(workload), int(COMPOSE["console"].environment["FRESHET_CONSOLE_PORT"])
    assert (workload["spec"]["replicas"], container(workload)["command"]) == (1, [*COMPOSE["console"].command])
    assert settings["FRESHET_CONSOLE_GATEWAY"] == f"{manifests.release}-gateway:{PROCESSES['gateway'].port}"
    assert ("FRESHET_TLS_CERT" in settings) == bool(values["tls"]["secret"])
    assert container(workload)["ports"] == [{"name": "http", "containerPort": port}]
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
    if values["networkPolicy"]["callers"]:
        (policy,) = [one for one in manifests.of("NetworkPolicy") if one["metadata"]["name"].endswith("-gateway")]
        let_in = [one.get("podSelector", {}).get("matchLabels") for one in policy["spec"]["ingress"][0]["from"]]
        assert service["spec"]["selector"] in let_in


def check_selected(manifests: Manifests, row: Process, workload: dict[str, Any]) -> None:
    """A disruption budget, one Service and where asked for one autoscaler are the workload's, and a policy lets in."""
    name, pod = workload["metadata"]["name"], workload["spec"]["template"]["metadata"]["labels"]
    budgets = [one for one in manifests.of("PodDisruptionBudget") if one["metadata"]["name"] == name]
    assert [budget["spec"]["selector"]["matchLabels"] for budget in budgets] == [pod], name
    leading = [one for one in manifests.of("Service") if one["spec"]["selector"].items() <= pod.items()]
    grpc = [port for one in leading for port in one["spec"]["ports"] if port["name"] == "grpc"]
    assert [port["port"] for port in grpc] == [row.port], name
    scalers = [one for one in manifests.of("HorizontalPodAutoscaler") if one["metadata"]["name"] == name]
    assert bool(scalers) == ("replicas" not in workload["spec"]), name
    policies = [one for one in manifests.of("NetworkPolicy") if one["metadata"]["name"].endswith(f"-{row.name}")]
    (opened,) = [rule["ports"] for policy in policies for rule in policy["spec"]["ingress"][:1]]
    assert opened[0] == {"port": row.port}, name


def check_confined(workload: dict[str, Any]) -> None:
    """As Kubernetes' `restricted` profile asks, and a read-only file system but for Kafka's."""
    own, pod = container(workload), workload["spec"]["template"]["spec"]
    name = workload["metadata"]["name"]
    assert pod["securityContext"]["runAsNonRoot"], name
    assert pod["securityContext"]["runAsUser"], name
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False), name
    security = own["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]}), name
    assert security["readOnlyRootFilesystem"] == (not name.endswith("-kafka")), name
    if labels(workload)["app.kubernetes.io/component"] in PROCESSES:
        assert pod["securityContext"]["runAsUser"] == 10001, name


def check_addresses(manifests: Manifests) -> None:
    """Each address that a setting names is a Service of the release with that port, or lies outside it."""
    for workload in manifests.of(*WORKLOADS):
        for setting, value in environment(workload).items():
            if not setting.startswith("FRESHET_"):
                continue
            for host, port in _addresses(value):
                if host.split("-")[0] != manifests.release:
                    assert host not in COMPOSE, f"{setting}={value} is compose's"
                    continue
                if setting == "FRESHET_INFERENCE_SERVER" and not manifests.workloads("inference-server"):
                    continue
                service = manifests.service(host.rpartition(".")[2] if "." in host else host)
                assert port in [one["port"] for one in service["spec"]["ports"]], f"{setting}={value}"


def _addresses(value: str) -> Iterator[tuple[str, int]]:
    for one in value.replace(";", ",").split(","):
        host, _, port = one.rpartition("://")[2].partition("/")[0].rpartition(":")
        if host and port.isdigit():
            yield host, int(port)


def check_shards(manifests: Manifests, values: dict[str, Any]) -> None:
    """Candidates have the shards, and the gateway asks them in their order."""
    shards = values["processes"]["candidates"]["shards"]
    said = [environment(one).get("FRESHET_CANDIDATES_SHARD") for one in manifests.workloads("candidates")]
    assert said == ([f"{shard}/{shards}" for shard in range(shards)] if shards > 1 else [None])
    (gateway,) = manifests.workloads("gateway")
    asked = environment(gateway)["FRESHET_CANDIDATES_ADDRESS"].split(";")
    suffixes = [f"-{shard}" for shard in range(shards)] if shards > 1 else [""]
    assert asked == [f"{manifests.release}-candidates{suffix}:50052" for suffix in suffixes]
    refreshers = environment(gateway)["FRESHET_REFRESHER_ADDRESSES"].split(",")
    assert len(refreshers) == values["processes"]["refresher"]["replicas"]


def merged(values: Any, over: Any) -> Any:
    """As Helm merges a profile into the defaults."""
    if not isinstance(values, dict) or not isinstance(over, dict):
        return over
    return values | {name: merged(values.get(name), value) for name, value in over.items()}


def values_of(chart: Path, profile: Path) -> Any:
    """The values that a profile has."""
    defaults, said = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (chart / "values.yaml", profile))
    return merged(defaults, said)
