"""The chart's small profile on a one-node cluster: it becomes ready, answers under load, and an update fails no call.

    python tests/chart/on_node.py BUNDLE FOLDER [OPTION OF HELM ...]

`kubectl` and `helm` are on the path and reach the cluster (cluster.sh starts one), this machine is its node, and the
images of docker-compose.yml are on it. FOLDER, which is emptied, holds the volumes. Outside CI. Kafka and Redis are
whatever images have those names; what they are is not asked here.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from services.contracts.processes import PROCESSES
from services.gateway.edge.first_keys import make_first_keys
from services.stack.folders import REPOSITORY

CHART = REPOSITORY / "deploy" / "chart"
RELEASE = NAMESPACE = "freshet"
RECOMMENDS_PER_S, EVENTS_PER_S, LOAD_S, UPDATES = 10, 20, 300, 3
# Who writes to each volume: the users of the images.
VOLUMES = {"models": 10001, "kafka": 1000, "redis": 999}


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def run(*command: str, said: str = "", timeout_s: float = 900) -> str:
    """The standard output. Raises: RuntimeError with what the command said."""
    done = subprocess.run(command, input=said or None, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def kubectl(*arguments: str, said: str = "") -> str:
    return run("kubectl", "--namespace", NAMESPACE, *arguments, said=said)


def volumes(bundle: Path, folder: Path) -> list[dict[str, Any]]:
    """Folders of this machine as volumes; the bundle lies in `models/bundle`. No provisioner is needed."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, user in VOLUMES.items():
        data = folder / name / "data"
        data.mkdir(parents=True)
        os.chown(data, user, user)
    shutil.copytree(bundle, folder / "models" / "bundle")
    claims = {"models": "freshet-models", "kafka": "data-freshet-kafka-0", "redis": "data-freshet-redis-0"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"freshet-{name}"},
            "spec": {
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": NAMESPACE, "name": claim},
                "hostPath": {"path": str(folder / name)},
            },
        }
        for name, claim in claims.items()
    ]


def prepare(bundle: Path, folder: Path) -> str:
    """Namespace, volumes and keys, as deploy/chart/README.md says; returns the API key."""
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": restricted}},
        *volumes(bundle, folder),
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "freshet-models", "namespace": NAMESPACE},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        },
    ]
    run("kubectl", "apply", "-f", "-", said=yaml.safe_dump_all(objects))
    keys, secrets = folder / "keys", folder / "secrets"
    secrets.mkdir()
    make_first_keys(keys, secrets)
    kubectl("create", "secret", "generic", "freshet-keys", f"--from-file={keys}")
    return (secrets / "api-key").read_text(encoding="utf-8").strip()


def release(*more: str) -> None:
    """Install or update, and wait until every pod of the new kind is ready."""
    small = str(CHART / "profiles" / "small.yaml")
    command = ("upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", small)
    run("helm", *command, *more, "--wait", "--timeout", "10m")


def pods() -> dict[str, str]:
    """Name of each pod of a process -> its identity."""
    found = json.loads(kubectl("get", "pods", "--output", "json"))["items"]
    return {
        one["metadata"]["name"]: one["metadata"]["uid"]
        for one in found
        if one["metadata"]["labels"]["app.kubernetes.io/component"] in PROCESSES
    }


def gateway() -> str:
    """Its Service's own address, which the node reaches, too."""
    service = json.loads(kubectl("get", "service", f"{RELEASE}-gateway", "--output", "json"))
    return f"{service['spec']['clusterIP']}:50050"


def load(bundle: Path, api_key: str, seconds: int) -> "subprocess.Popen[str]":
    """Recommend and events at fixed rates, from outside the cluster."""
    rates = ("--recommend-rate", str(RECOMMENDS_PER_S), "--event-rate", str(EVENTS_PER_S), "--seconds", str(seconds))
    where = ("--target", gateway(), "--allow-remote", "--items", str(bundle), "--timeout-ms", "5000", "--json")
    command = (sys.executable, "-m", "services.cli", "loadtest", "steady", *rates, *where)
    environment = os.environ | {"FRESHET_API_KEY": api_key}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def report(running: "subprocess.Popen[str]", what: str) -> None:
    """Wait for the load's end, say what it saw. Raises: AssertionError where a call failed."""
    said, _ = running.communicate(timeout=LOAD_S + 120)
    summary = json.loads(said.strip().splitlines()[-1])
    for name, call in summary["calls"].items():
        latency = ", ".join(f"{share} {value:.0f}" for share, value in call["latency_ms"].items())
        say(f"{what}: {name}: {call['ok']} of {call['sent']} ok, errors {call['errors']}, ms {latency}")
    say(f"{what}: marks {summary.get('degradations')}")
    assert all(call["ok"] == call["sent"] > 0 and not call["not_sent"] for call in summary["calls"].values())


def update(number: int, more: Sequence[str]) -> None:
    """Every process is replaced, as its pod's settings change; the change does nothing."""
    began, before = time.monotonic(), pods()
    release(*more, "--set", f"settings.OTEL_SERVICE_NAMESPACE=update-{number}")
    # The old pods may still be ending.
    while left := [name for name, identity in pods().items() if identity in before.values()]:
        assert time.monotonic() - began < 600, f"not replaced: {left}"
        time.sleep(1)
    say(f"update {number}: every process replaced after {time.monotonic() - began:.0f} s")


def main(arguments: Sequence[str]) -> int:
    bundle, folder = (Path(argument).resolve() for argument in arguments[:2])
    api_key = prepare(bundle, folder)
    began = time.monotonic()
    release(*arguments[2:])
    say(f"all pods ready after {time.monotonic() - began:.0f} s\n{kubectl('get', 'pods')}")
    report(load(bundle, api_key, 60), "at rest")
    running = load(bundle, api_key, LOAD_S)
    time.sleep(10)
    for number in range(UPDATES):
        update(number, arguments[2:])
    assert running.poll() is None, "the load ended before the updates"
    report(running, "during the updates")
    say("passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
