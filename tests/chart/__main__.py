"""`make chart-test`: deploy/chart as Helm renders it, against the process table, and what it refuses.

Outside CI, which has no Helm: one that is not on the path is built from its Go module into the cache, some minutes the
first time; without Go it skips and says so. Where `kubectl` reaches an API server, every profile is given to it as a
dry run on the server, in a namespace whose policy is `restricted`. Whether the stack then works is not asked here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from rendered import Manifests, check, values_of

from services.stack.folders import REPOSITORY, cache_root

CHART = REPOSITORY / "deploy" / "chart"
PROFILES = sorted((CHART / "profiles").glob("*.yaml"))
HELM_MODULE = "helm.sh/helm/v3/cmd/helm@v3.18.6"
RELEASE = NAMESPACE = "freshet"
# A Helm that was built from its module believes in Kubernetes 1.20.
KUBE_VERSION = "--kube-version=1.33.4"
# Kinds of the Prometheus Operator, which a bare API server does not know.
OF_OPERATORS = ("ServiceMonitor", "PrometheusRule")
# What is set over the small profile, and what the refusal says of it: which value, and what is allowed.
REFUSED = {
    "kafka.inside=false": 'kafka.bootstrap="" allowed: host:port of your brokers',
    "kafka.bootstrap=k:9092": 'kafka.bootstrap="k:9092" allowed: beside kafka.inside=false',
    "kafka.security=SASL_SSL": 'kafka.security="SASL_SSL", kafka.user="", kafka.secret="" allowed: beside',
    "kafka.inside=false,kafka.bootstrap=k:9092,kafka.security=SASL_SSL": 'kafka.user="", kafka.secret="" allowed: both',
    "kafka.inside=false,kafka.bootstrap=k:9092,kafka.user=a": 'kafka.user="a", kafka.secret="" allowed: neither',
    "kafka.inside=false,kafka.bootstrap=k": "kafka/bootstrap",
    "redis.inside=false": 'redis.secret="" allowed: the name of a Secret',
    "redis.secret=mine": 'redis.secret="mine" allowed: beside redis.inside=false',
    "bundle.volume=null": "bundle.volume={} allowed: a volume with the model bundle",
    "text.folder=text": 'text.folder="text" allowed: beside text.volume',
    "keys.secret=": 'keys.secret="" allowed: the name of a Secret',
    "inferenceServer.cards=1": "inferenceServer.cards=1 allowed: beside inferenceServer.enabled=true",
    "processes.candidates.shards=0": "processes/candidates/shards",
    "processes.gateway.replicas.min=4": "processes.gateway.replicas.min=4 allowed: at most",
    "processes.refresher.replicas.min=2": "processes/refresher",
    "processes.ranker.cpu=1": "processes",
    "settings.FRESHET_HOST=0.0.0.0": "settings.FRESHET_HOST allowed: nowhere",
    "processes.gateway.settings.FRESHET_ENCODER_ADDRESS=x": "processes.gateway.settings.FRESHET_ENCODER_ADDRESS",
    "settings.PATH=/": "settings",
    "retraining.schedule=30 3 * * *": 'retraining.claim="" allowed: the name of a PersistentVolumeClaim',
    "retraining.claim=models": 'retraining.schedule="" allowed: when to run',
    "drain.pauseSeconds=0": "drain/pauseSeconds",
}


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def run(*command: str, said: str = "") -> str:
    """The standard output. Raises: RuntimeError with what the command said."""
    done = subprocess.run(command, input=said or None, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def helm() -> str | None:
    """The program; None where there is neither it nor Go."""
    built = cache_root() / "kubernetes" / "bin" / "helm"
    if found := shutil.which("helm"):
        return found
    if not built.exists():
        if shutil.which("go") is None:
            return None
        say(f"building {HELM_MODULE} into {built.parent}")
        environment = os.environ | {"GOBIN": str(built.parent), "GOFLAGS": "-mod=mod"}
        subprocess.run(["go", "install", HELM_MODULE], env=environment, cwd=tempfile.gettempdir(), check=True)
    return str(built)


def template(program: str, profile: Path, *more: str) -> str:
    release = ("template", RELEASE, str(CHART), "--namespace", NAMESPACE, KUBE_VERSION)
    return run(program, *release, "--values", str(profile), *more)


def check_refusals(program: str) -> None:
    """Each contradiction is refused, by value and what is allowed, and not by another one's words."""
    small = CHART / "profiles" / "small.yaml"
    for given, expected in REFUSED.items():
        with pytest.raises(RuntimeError) as refusal:
            template(program, small, *(f"--set={part}" for part in given.split(",")))
        assert expected in str(refusal.value), f"{given}\n{refusal.value}"
    say(f"refusals: {len(REFUSED)} contradictory values, each by what and where")


@contextmanager
def api_server() -> Iterator[bool]:
    """Whether `kubectl` reaches one; then the namespace is there while the block runs."""
    try:
        run("kubectl", "get", "--raw=/readyz", "--request-timeout=5s")
    except (RuntimeError, OSError):
        yield False
        return
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    namespace["metadata"] |= {
        "labels": {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("warn", "enforce")}
    }
    run("kubectl", "apply", "-f", "-", said=yaml.safe_dump(namespace))
    try:
        yield True
    finally:
        run("kubectl", "delete", "namespace", NAMESPACE, "--wait=false")


def check_applied(manifests: Manifests, name: str) -> None:
    """The API server takes every object, and warns of none."""
    known = [one for one in manifests.objects if one["kind"] not in OF_OPERATORS]
    command = ["kubectl", "apply", "--dry-run=server", "--namespace", NAMESPACE, "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump_all(known), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    assert len(done.stdout.splitlines()) == len(known)
    say(f"{name}: the API server takes {len(known)} objects")


def main() -> int:
    program = helm()
    if program is None:
        say("skipped: neither helm nor go is on the path")
        return 0
    with api_server() as answers:
        for profile in PROFILES:
            run(program, "lint", "--strict", str(CHART), KUBE_VERSION, "--values", str(profile))
            manifests = Manifests(template(program, profile), RELEASE)
            check(manifests, values_of(CHART, profile))
            say(f"{profile.stem}: lint, and {len(manifests.objects)} objects as the process table has them")
            if answers:
                check_applied(manifests, profile.stem)
        if not answers:
            say("not asked: kubectl reaches no API server")
    check_refusals(program)
    say("passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
